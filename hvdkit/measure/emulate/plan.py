"""What is replayed: the collectives of one training step, in order, and how many steps; and where these are from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr, replace

from hvdkit.common import json_files
from hvdkit.common.allreduce import COMPRESSIONS
from hvdkit.common.json_files import Document, Part, Positive, Seconds, Whole
from hvdkit.common.units import ITEM_SIZES, count_text, printable
from hvdkit.errors import CorruptDataError, InvalidArgumentError
from hvdkit.measure.model import ask

DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64"]
PER = ("parameter", "layer")
TRIALS = 20
"""Steps when nothing says how many."""
SOURCES = {"sizes": "--sizes", "begin": "--begin", "model": "--model", "timeline": "--timeline", "plan_file": "--plan"}
"""Where the sizes can come from: the name of the option's value, and the option."""
_BELONGS = {
    "per": ("model",),
    "input_shape": ("model",),
    "dtype": ("sizes", "begin"),
    "end": ("begin",),
    "factor": ("begin",),
}
"""Options that say more about a source, and the sources that they are for."""


class Collective(Part, frozen=True, rename={"nbytes": "bytes"}):
    """One collective.

    Attributes:
        name: of the tensor or of the layer.
        elements: how many numbers it holds.
        dtype: their type, one of ``DTYPES``.
        gap_s: seconds of computation before it.
        nbytes: its size, which follows from the others; 0 where it is not given.
    Raises:
        InvalidArgumentError: an unknown type, or a size that is not that of the elements.
    """

    name: str
    elements: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    dtype: str = "float32"
    gap_s: Seconds = 0.0
    nbytes: Whole = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"The type of {self.name!r} is {self.dtype!r}; expected one of {', '.join(DTYPES)}."
            )
        found = self.elements * ITEM_SIZES[self.dtype]
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
        trials: how many steps.
        source: where the sizes and their order are from, in words.
        nbytes: of one step, which follows from the collectives.
    """

    kind = "emulate-plan"
    schema = 2
    written_by = "hvdkit emulate sizes"

    collectives: Annotated[tuple[Collective, ...], msgspec.Meta(min_length=1)]
    trials: Positive = TRIALS
    source: str = ""
    nbytes: Whole = 0

    def __post_init__(self) -> None:
        force_setattr(self, "nbytes", sum(one.nbytes for one in self.collectives))


def plan_of(**options: Any) -> ReplayPlan:
    """The plan that options of ``cli.PLAN_OPTIONS`` ask for, by name; None where one is not given.

    Raises:
        InvalidArgumentError: options that do not go together, or a value that cannot be right.
        DataError: a file that cannot be used.
    """
    wanted = {name: value for name, value in options.items() if value is not None}
    source = _source(wanted)
    if source == "plan_file":
        plan = json_files.read(wanted["plan_file"], ReplayPlan)
    else:
        if source == "timeline":
            collectives, words = of_timeline(wanted["timeline"])
        elif source == "model":
            per, factory = wanted.get("per", PER[0]), wanted["model"]
            said = ask("hvdkit.measure.model", factory, per=per, input_shape=wanted.get("input_shape"))
            collectives = tuple(Collective(one["name"], one["elements"], one["dtype"]) for one in said["gradients"])
            words = f"model {factory.rpartition(':')[2]} ({said['framework']}), per {per}, {said['order']}"
        else:
            collectives, words = _of_sizes(wanted, source)
        plan = ReplayPlan(collectives, source=words)
    if "gap_ms" in wanted:
        gap_s = wanted["gap_ms"] / 1000
        plan = replace(plan, collectives=tuple(replace(one, gap_s=gap_s) for one in plan.collectives))
    counted = [name for name in ("samples", "batch_size", "epochs") if name in wanted]
    if not counted:
        return replace(plan, trials=wanted.get("trials", plan.trials))
    if "trials" in wanted or "samples" not in wanted or "batch_size" not in wanted:
        raise InvalidArgumentError(
            "The trials are --trials, or follow from --samples and --batch-size (and --epochs); give one or the other."
        )
    batches, epochs = -(-wanted["samples"] // wanted["batch_size"]), wanted.get("epochs", 1)
    words = (
        f"{plan.source}; batch_count {batches} (--samples / --batch-size, rounded up) * {count_text(epochs, 'epoch')}"
    )
    return replace(plan, trials=batches * epochs, source=words)  # the last partial batch is a step, too


def _source(wanted: Mapping[str, Any]) -> str:
    """The one option that says the sizes; options that would do nothing beside it are refused."""
    found = [name for name in SOURCES if name in wanted]
    if not found and "end" in wanted:
        raise InvalidArgumentError("--end is given without --begin; give both, such as --begin 8 --end 128M.")
    if len(found) != 1:
        what = "none is given" if not found else f"{' and '.join(SOURCES[name] for name in found)} are given"
        raise InvalidArgumentError(
            f"The sizes come from one of {', '.join(SOURCES.values())}; {what}. Give one, such as --sizes 4096,1024."
        )
    for name, sources in _BELONGS.items():
        if name in wanted and found[0] not in sources:
            option, belongs = f"--{name.replace('_', '-')}", " or ".join(SOURCES[one] for one in sources)
            raise InvalidArgumentError(
                f"{option} is given with {SOURCES[found[0]]}, which it says nothing about; {option} is for {belongs}."
            )
    return found[0]


def _of_sizes(wanted: Mapping[str, Any], source: str) -> tuple[tuple[Collective, ...], str]:
    """The collectives of ``--sizes``, or of ``--begin`` and what belongs to it (nccl-tests, options -b, -e and -f)."""
    sizes = [wanted[source]] if source == "begin" else wanted["sizes"]
    if source == "begin":
        if "end" not in wanted:
            raise InvalidArgumentError("--begin is given without --end; give both, such as --begin 8 --end 128M.")
        if wanted["end"] < wanted["begin"]:
            raise InvalidArgumentError(
                f"--begin is {wanted['begin']} bytes and --end {wanted['end']}; expected an end that is no less."
            )
        factor = wanted.get("factor", 2)
        while sizes[-1] * factor <= wanted["end"]:
            sizes.append(sizes[-1] * factor)
    dtype = wanted.get("dtype", "float32")
    item = ITEM_SIZES[dtype]
    found = []
    for number, nbytes in enumerate(sizes, start=1):
        if nbytes % item:
            raise InvalidArgumentError(
                f"The size of 'layer{number}' is {nbytes} bytes; expected a multiple above 0 of the {item} bytes of a "
                f"{dtype}, such as {max(1, round(nbytes / item)) * item}."
            )
        found.append(Collective(f"layer{number}", nbytes // item, dtype))
    if source == "begin":
        return tuple(found), "sizes from the least to the greatest"
    words = "a list of sizes, layers from the first to the last, replayed from the last to the first"
    return tuple(found[::-1]), words


def of_timeline(path: Path) -> tuple[tuple[Collective, ...], str]:
    """The tensors that a step reduces, in the order in which the ranks announced them, and in words what they are.

    A tensor's place is the median of its places in all steps. The gap before it is the median time from the
    announcement of the tensor before it to its own; before the first one, from the end of the previous step's last
    operation. So a gap is time in which the training computed. The first step, which starts up, does not count for
    gaps.

    Args:
        path: a file that HOROVOD_TIMELINE named.
    Raises:
        DataError: it cannot be read, holds no reduction, or says no sizes.
    """
    from hvdkit.read.timeline.columns import PACKED, collect
    from hvdkit.read.timeline.reader import read
    from hvdkit.read.timeline.summary import find_steps

    columns = collect(read(path))
    numbers, in_steps, _ = find_steps(columns)
    if in_steps.any():
        rows = np.flatnonzero(in_steps)
        steps = np.split(rows, np.flatnonzero(np.diff(numbers[rows])) + 1)
        words = f"of {len(steps)} recorded steps"
    else:
        reduced = [number for number, tensor in enumerate(columns.tensors) if tensor.is_reduced]
        rows = np.flatnonzero(np.isin(columns.tensor, reduced))
        _, first = np.unique(columns.tensor[rows], return_index=True)
        steps = [rows[np.sort(first)]] if len(rows) else []
        words = "without steps (no tensor is reduced three times), each tensor once, without gaps"
    if not steps:
        raise CorruptDataError(
            f"{str(path)!r} holds no reduction; expected a file that HOROVOD_TIMELINE named, of a job that trained."
        )
    places: dict[int, list[int]] = {}
    for rows in steps:
        for place, number in enumerate(columns.tensor[rows].tolist()):
            places.setdefault(number, []).append(place)
    gaps: dict[int, list[float]] = {}
    for before, rows in itertools.pairwise(steps):
        previous = float(columns.end[before].max())
        for row in rows.tolist():
            begin = float(columns.begin[row])
            gaps.setdefault(int(columns.tensor[row]), []).append(max(0.0, begin - previous))
            previous = begin
    found = []
    for number in sorted(places, key=lambda number: (float(np.median(places[number])), number)):
        tensor = columns.tensors[number]
        elements = 0 if tensor.shape is None or tensor.dtype not in DTYPES else math.prod(tensor.shape)
        dtype = tensor.dtype
        if tensor.role == PACKED:  # bytes, of which the gradients were float32
            elements, dtype = round(elements / COMPRESSIONS["int8"].number), "float32"
        if elements:
            gap_s = float(np.median(gaps.get(number, [0.0]))) / 1e6
            found.append(Collective(printable(tensor.name), elements, dtype, gap_s))
    if not found:
        raise CorruptDataError(
            f"{str(path)!r} says no size of a reduced tensor; expected dtype and shape in its events."
        )
    unknown = sum(columns.tensors[number].kind != "ALLTOALL" for number in places) - len(found)
    if unknown:
        words += f"; {unknown} tensors without a known type and shape are left out"
    return tuple(found), f"timeline {path.name}, {words}, in the order of their announcement"
