"""Sizes, order and gaps of the reductions that a HOROVOD_TIMELINE recorded."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.units import printable
from hvdkit.errors import CorruptDataError
from hvdkit.measure.emulate.plan import DTYPES, Collective
from hvdkit.read.timeline.columns import Tensor, TimelineColumns, collect
from hvdkit.read.timeline.reader import read
from hvdkit.read.timeline.summary import REDUCTIONS, find_steps

_Indices = NDArray[np.intp]


def of_timeline(path: Path) -> tuple[list[Collective], str]:
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
    columns = collect(read(path))
    numbers, in_steps = find_steps(columns)
    if in_steps.any():
        rows = np.flatnonzero(in_steps)
        steps = list(np.split(rows, np.flatnonzero(np.diff(numbers[rows])) + 1))
        words = f"of {len(steps)} recorded steps"
    else:
        reduced = [number for number, tensor in enumerate(columns.tensors) if tensor.kind in REDUCTIONS]
        rows = np.flatnonzero(np.isin(columns.tensor, reduced))
        _, first = np.unique(columns.tensor[rows], return_index=True)
        steps = [rows[np.sort(first)]] if len(rows) else []
        words = "without steps (no tensor is reduced three times), each tensor once, without gaps"
    if not steps:
        raise CorruptDataError(
            f"{str(path)!r} holds no reduction; expected a file that HOROVOD_TIMELINE named, of a job that trained."
        )
    order = _order(columns, steps)
    gaps = _gaps(columns, steps)
    known = [number for number in order if _elements(columns.tensors[number]) > 0]
    if not known:
        raise CorruptDataError(
            f"{str(path)!r} says no size of a reduced tensor; expected dtype and shape in its events."
        )
    if len(known) < len(order):
        words += f"; {len(order) - len(known)} tensors without a known type and shape are left out"
    found = [(columns.tensors[number], gaps.get(number, 0.0)) for number in known]
    collectives = [Collective(printable(one.name), _elements(one), one.dtype, gap_s) for one, gap_s in found]
    return collectives, f"timeline {path.name}, {words}, in the order of their announcement"


def _order(columns: TimelineColumns, steps: list[_Indices]) -> list[int]:
    places: dict[int, list[int]] = {}
    for rows in steps:
        for place, number in enumerate(columns.tensor[rows].tolist()):
            places.setdefault(number, []).append(place)
    return sorted(places, key=lambda number: (float(np.median(places[number])), number))


def _gaps(columns: TimelineColumns, steps: list[_Indices]) -> dict[int, float]:
    """Tensor to the median computation before it, in seconds; empty with fewer than two steps."""
    found: dict[int, list[float]] = {}
    for before, rows in itertools.pairwise(steps):
        previous = float(columns.end[before].max())
        for row in rows.tolist():
            begin = float(columns.begin[row])
            found.setdefault(int(columns.tensor[row]), []).append(max(0.0, begin - previous))
            previous = begin
    return {number: float(np.median(values)) / 1e6 for number, values in found.items()}


def _elements(tensor: Tensor) -> int:
    """How many there are; 0 where the file does not say, or says a type that cannot be replayed."""
    return 0 if tensor.shape is None or tensor.dtype not in DTYPES else math.prod(tensor.shape)
