"""What is replayed: the collectives of one training step, in order, and how many steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import DataError, DataNotFoundError, InvalidArgumentError

_MARK = "emulate plan"
VERSION = 1
DTYPES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "int64": 8,
}
"""Bytes of an element, by the type's name."""
TRIALS = 20
"""Steps when nothing says how many."""
_MOST_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Attributes:
        name: of the tensor or of the layer.
        elements: how many numbers it holds, >= 1.
        dtype: their type, a key of ``DTYPES``.
        gap_s: seconds of computation before it, >= 0.
    Raises:
        InvalidArgumentError: a value that cannot be right.
    """

    name: str
    elements: int
    dtype: str = "float32"
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"The type of {self.name!r} is {self.dtype!r}; expected one of {', '.join(DTYPES)}."
            )
        if not _whole(self.elements) or not 1 <= self.elements * DTYPES[self.dtype] <= _MOST_BYTES:
            raise InvalidArgumentError(
                f"{self.name!r} has {self.elements!r} elements; expected a whole number from 1 to what memory holds."
            )
        if isinstance(self.gap_s, bool) or not isinstance(self.gap_s, int | float) or not 0 <= self.gap_s < math.inf:
            raise InvalidArgumentError(
                f"The gap before {self.name!r} is {self.gap_s!r} s; expected a finite number of at least 0."
            )

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.elements * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is replayed.

    Attributes:
        collectives: of one step, in the order in which they are replayed: as backward produces them, last layer first.
        trials: how many steps, >= 1.
        source: where the sizes and their order are from, in words.
        samples, batch_size, epochs, batch_count: how ``trials`` was found; None where it was given as a number.
            ``batch_count`` is samples / batch_size, rounded up, and ``trials`` is batch_count * epochs.
    Raises:
        InvalidArgumentError: no collective, or a value that cannot be right.
    """

    collectives: tuple[Collective, ...]
    trials: int = TRIALS
    source: str = ""
    samples: int | None = None
    batch_size: int | None = None
    epochs: int | None = None
    batch_count: int | None = None

    def __post_init__(self) -> None:
        if not self.collectives:
            raise InvalidArgumentError("The plan has no collective; expected at least one size above 0 bytes.")
        for name in ("trials", "samples", "batch_size", "epochs", "batch_count"):
            value = getattr(self, name)
            if not (value is None and name != "trials") and not (_whole(value) and value >= 1):
                raise InvalidArgumentError(f"{name} is {value!r}; expected a whole number of at least 1.")

    @property
    def nbytes(self) -> int:
        """Bytes of one step."""
        return sum(one.nbytes for one in self.collectives)

    def as_json(self) -> dict[str, Any]:
        """For a file or a program; sizes in bytes, gaps in seconds."""
        return {
            "hvdkit": _MARK,
            "version": VERSION,
            "source": self.source,
            "samples": self.samples,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "batch_count": self.batch_count,
            "trials": self.trials,
            "bytes": self.nbytes,
            "collectives": [
                {
                    "name": one.name,
                    "elements": one.elements,
                    "dtype": one.dtype,
                    "bytes": one.nbytes,
                    "gap_s": one.gap_s,
                }
                for one in self.collectives
            ],
        }


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def from_json(value: Any) -> Plan:
    """The plan that ``Plan.as_json`` wrote.

    Raises:
        DataError: it is something else, or one of its numbers cannot be right.
    """
    try:
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object.")
        if value["hvdkit"] != _MARK or value["version"] != VERSION:
            raise ValueError("it says that it is something else")
        plan = Plan(
            tuple(_collective(one) for one in value["collectives"]),
            value["trials"],
            str(value.get("source", "")),
            *(value.get(name) for name in ("samples", "batch_size", "epochs", "batch_count")),
        )
        _check_trials(plan)
    except KeyError as error:
        raise DataError(f"Not a plan of 'hvdkit emulate sizes' (version {VERSION}): {error} is missing.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"Not a plan of 'hvdkit emulate sizes' (version {VERSION}): {error}") from error
    return plan


def _collective(value: Mapping[str, Any]) -> Collective:
    found = Collective(str(value["name"]), value["elements"], value["dtype"], value.get("gap_s", 0.0))
    if value.get("bytes", found.nbytes) != found.nbytes:
        raise ValueError(
            f"{found.name!r} has {found.elements} elements of {found.dtype}, which are {found.nbytes} bytes, not "
            f"{value['bytes']!r}."
        )
    return found


def _check_trials(plan: Plan) -> None:
    """A file that was edited by hand in one place only is refused."""
    if plan.samples is None or plan.batch_size is None or plan.epochs is None:
        return
    found = batches(plan.samples, plan.batch_size)
    if plan.batch_count != found or plan.trials != found * plan.epochs:
        raise ValueError(
            f"{plan.samples} samples in batches of {plan.batch_size} are {found} batches, {plan.epochs} times; it says "
            f"batch_count {plan.batch_count} and trials {plan.trials}."
        )


def read(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        DataNotFoundError: there is none.
        DataError: it cannot be read, or is something else.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"No plan at {str(path)!r}; expected a file that 'hvdkit emulate sizes -o' wrote."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"Cannot read the plan {str(path)!r}: {error}.") from error
    try:
        return from_json(value)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def write(path: Path, plan: Plan) -> None:
    """Write a plan file; an older one stays whole until the new one is complete.

    Raises:
        DataError, InvalidArgumentError: it cannot be written.
    """
    from hvdkit.common.files import replacing

    with replacing(Path(path)) as file:
        file.write((json.dumps(plan.as_json(), indent=1, allow_nan=False) + "\n").encode())


def from_sizes(
    sizes: Sequence[int],
    dtype: str = "float32",
    *,
    names: Sequence[str] | None = None,
    trials: int = TRIALS,
    gap_s: float = 0.0,
    source: str = "a list of sizes",
) -> Plan:
    """A plan of sizes in bytes, replayed in this order.

    Args:
        sizes: bytes of each collective, whole numbers of elements.
        dtype: the type of all of them.
        names: of each; by default its number and its size.
        trials: how many steps.
        gap_s: seconds of computation before each.
        source: where the sizes are from.
    Raises:
        InvalidArgumentError: a size that is not a whole number of elements, or a value that cannot be right.
    """
    called = [f"collective{index}" for index in range(len(sizes))] if names is None else names
    return Plan(
        tuple(
            Collective(name, elements_of(size, dtype, name), dtype, gap_s)
            for name, size in zip(called, sizes, strict=True)
        ),
        trials,
        source,
    )


def elements_of(nbytes: int, dtype: str, name: str) -> int:
    """How many elements of a type these bytes are.

    Raises:
        InvalidArgumentError: an unknown type, or not a whole number of elements above 0.
    """
    item = DTYPES.get(dtype)
    if item is None:
        raise InvalidArgumentError(f"The type of {name!r} is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    if nbytes < 1 or nbytes % item:
        raise InvalidArgumentError(
            f"The size of {name!r} is {nbytes} bytes; expected a multiple above 0 of the {item} bytes of a {dtype}, "
            f"such as {max(1, round(nbytes / item)) * item}."
        )
    return nbytes // item


def batches(samples: int, batch_size: int) -> int:
    """Steps of one epoch: the last batch counts although it is smaller, as ``len(DataLoader)`` counts it.

    Args:
        samples: of the data set, >= 1.
        batch_size: samples of one step, all ranks together, >= 1.
    Raises:
        InvalidArgumentError: a number below 1.
    """
    if samples < 1 or batch_size < 1:
        raise InvalidArgumentError(
            f"There are {samples} samples in batches of {batch_size}; expected numbers of at least 1."
        )
    return -(-samples // batch_size)
