"""What is replayed: the collectives of one training step, in order, and how many steps."""

from __future__ import annotations

import math

from msgspec.structs import force_setattr

from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import ITEM_SIZES
from hvdkit.errors import InvalidArgumentError

DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64"]
TRIALS = 20
"""Steps when nothing says how many."""
_MOST_BYTES = 1 << 50


class Collective(Part, frozen=True, rename={"nbytes": "bytes"}):
    """One collective.

    Attributes:
        name: of the tensor or of the layer.
        elements: how many numbers it holds, >= 1.
        dtype: their type, one of ``DTYPES``.
        gap_s: seconds of computation before it, >= 0.
        nbytes: its size, which follows from the others; 0 where it is not given.
    Raises:
        InvalidArgumentError: a value that cannot be right.
    """

    name: str
    elements: int
    dtype: str = "float32"
    gap_s: float = 0.0
    nbytes: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"The type of {self.name!r} is {self.dtype!r}; expected one of {', '.join(DTYPES)}."
            )
        found = self.elements * ITEM_SIZES[self.dtype]
        if not 1 <= found <= _MOST_BYTES:
            raise InvalidArgumentError(
                f"{self.name!r} has {self.elements!r} elements; expected a whole number from 1 to what memory holds."
            )
        if not 0 <= self.gap_s < math.inf:
            raise InvalidArgumentError(
                f"The gap before {self.name!r} is {self.gap_s!r} s; expected a finite number of at least 0."
            )
        if self.nbytes not in (0, found):
            raise InvalidArgumentError(
                f"{self.name!r} has {self.elements} elements of {self.dtype}, which are {found} bytes, not "
                f"{self.nbytes}."
            )
        force_setattr(self, "nbytes", found)


class ReplayPlan(Document, frozen=True, rename={"nbytes": "bytes"}):
    """What is replayed.

    Attributes:
        collectives: of one step, in the order in which they are replayed: as backward produces them, last layer first.
        trials: how many steps, >= 1.
        source: where the sizes and their order are from, in words.
        samples, batch_size, epochs, batch_count: how ``trials`` was found; None where it was given as a number.
            ``batch_count`` is samples / batch_size, rounded up, and ``trials`` is batch_count * epochs.
        nbytes: of one step, which follows from the collectives.
    Raises:
        InvalidArgumentError: no collective, or values that cannot be right, or not together.
    """

    kind = "emulate-plan"
    written_by = "hvdkit emulate sizes"

    collectives: tuple[Collective, ...]
    trials: int = TRIALS
    source: str = ""
    samples: int | None = None
    batch_size: int | None = None
    epochs: int | None = None
    batch_count: int | None = None
    nbytes: int = 0

    def __post_init__(self) -> None:
        if not self.collectives:
            raise InvalidArgumentError("The plan has no collective; expected at least one size above 0 bytes.")
        for name in ("trials", "samples", "batch_size", "epochs", "batch_count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} is {value!r}; expected a whole number of at least 1.")
        if self.samples is not None and self.batch_size is not None and self.epochs is not None:
            found = batches(self.samples, self.batch_size)
            if self.batch_count != found or self.trials != found * self.epochs:
                raise InvalidArgumentError(
                    f"{self.samples} samples in batches of {self.batch_size} are {found} batches, {self.epochs} times; "
                    f"it says batch_count {self.batch_count} and trials {self.trials}."
                )
        force_setattr(self, "nbytes", sum(one.nbytes for one in self.collectives))


def elements_of(nbytes: int, dtype: str, name: str) -> int:
    """How many elements of a type these bytes are.

    Raises:
        InvalidArgumentError: an unknown type, or not a whole number of elements above 0.
    """
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"The type of {name!r} is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    item = ITEM_SIZES[dtype]
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
    """
    return -(-samples // batch_size)
