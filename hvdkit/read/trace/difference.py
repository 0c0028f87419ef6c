"""Two traces compared: which operator takes longer in a step, and whether that may be chance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.json_files import Document
from hvdkit.errors import InvalidArgumentError
from hvdkit.read.trace.columns import collect
from hvdkit.read.trace.operators import nest
from hvdkit.read.trace.results import TIMES, RankTrace
from hvdkit.read.trace.summary import files_of, one_rank, self_times_by_step

ENOUGH = 4
"""Steps on each side with which ranges that do not touch are no chance: 2 in 70 that they would by chance."""


@dataclass(frozen=True)
class OperatorChange:
    """One name in both traces; times are those of a step.

    Attributes:
        name, kind: of the operator, kernel, range or part.
        calls_a, calls_b: in a step; None for a part, which is no call.
        mean_a, mean_b: self time of a step; 0 where it is not in that trace.
        explains: mean_b - mean_a, by which a step of B is longer on account of it.
        clear: every step of one takes longer than any step of the other, with at least 4 steps on each side.
    """

    name: str
    kind: str
    calls_a: float | None
    calls_b: float | None
    mean_a: float
    mean_b: float
    explains: float
    clear: bool


class TraceDifference(Document, frozen=True):
    """What takes longer in a step of trace B than in one of A; seconds.

    Attributes:
        a, b: of each.
        steps_a, steps_b: how many there are; 1 where the trace has none, the whole of it.
        parts: step, computation, communication, exposed communication and data loading.
        operators: by what they explain, the largest first.
    """

    kind = "trace-diff"
    written_by = "hvdkit trace diff --json"
    times = TIMES
    unit_s = 1e-3

    a: RankTrace
    b: RankTrace
    steps_a: int
    steps_b: int
    parts: tuple[OperatorChange, ...]
    operators: tuple[OperatorChange, ...]


def compare(a: str | Path, b: str | Path) -> TraceDifference:
    """Compare two traces, such as rank 0 before and after a change.

    Args:
        a, b: of files that torch.profiler exported, or directories with one trace each.
    Raises:
        InvalidArgumentError: a directory with several traces.
        DataNotFoundError, DataError, CorruptDataError: a file is missing, cannot be read, or is no whole trace.
    """
    found, tables = [], []
    for path in (a, b):
        columns = collect(_one_of(path))
        found.append(one_rank(columns))
        tables.append(self_times_by_step(columns, nest(columns)))
    (times_a, steps_a), (times_b, steps_b) = tables
    counts = [{(one.name, one.kind): one.calls for one in rank.operators} for rank in found]
    changes = []
    for key in sorted(times_a.keys() | times_b.keys()):
        side_a, side_b = times_a.get(key, np.zeros(steps_a)), times_b.get(key, np.zeros(steps_b))
        calls = counts[0].get(key, 0) / steps_a, counts[1].get(key, 0) / steps_b
        changes.append(_change(*key, calls, side_a, side_b))
    changes.sort(key=lambda change: (-abs(change.explains), change.name))
    return TraceDifference(found[0], found[1], steps_a, steps_b, _parts(found[0], found[1]), tuple(changes))


def _one_of(path: str | Path) -> Path:
    files = files_of([path])
    if len(files) > 1:
        raise InvalidArgumentError(
            f"{str(path)!r} holds {len(files)} traces; give one of them, such as {str(files[0])!r}."
        )
    return files[0]


def _change(
    name: str,
    kind: str,
    calls: tuple[float | None, float | None],
    a: NDArray[np.float64],
    b: NDArray[np.float64],
) -> OperatorChange:
    """Of an operator or a part: ``calls`` and times in recordings A and B, ``a`` and ``b`` by step, (steps,)."""
    apart = bool(a.max() < b.min() or b.max() < a.min())
    mean_a, mean_b = float(a.mean()), float(b.mean())
    clear = apart and min(len(a), len(b)) >= ENOUGH
    return OperatorChange(
        name=name,
        kind=kind,
        calls_a=calls[0],
        calls_b=calls[1],
        mean_a=mean_a,
        mean_b=mean_b,
        explains=mean_b - mean_a,
        clear=clear,
    )


def _parts(a: RankTrace, b: RankTrace) -> tuple[OperatorChange, ...]:
    names = ("step", "computation", "communication", "exposed", "data")
    sides = []
    for rank in (a, b):
        times = rank.times
        whole = np.array([[times.window, times.computation, times.communication, times.exposed, times.data]])
        steps = [[one.duration, one.computation, one.communication, one.exposed, one.data] for one in rank.steps]
        sides.append(np.array(steps) if steps else whole)
    return tuple(_change(name, "part", (None, None), sides[0][:, at], sides[1][:, at]) for at, name in enumerate(names))
