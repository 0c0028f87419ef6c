"""The arithmetic of a summary: distributions, unions of intervals, batches, steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.observe.lateness import Floats

Intervals = tuple[Floats, Floats]
"""Starts and ends of disjoint intervals, in order; any unit."""


@dataclass(frozen=True)
class Distribution:
    """Of a set of values, in their unit; percentiles are exact, by linear interpolation.

    Attributes:
        count: how many.
        total: their sum.
        p50, p95, p99: so many in a hundred are at most as large.
        max: the largest.
    """

    count: int
    total: float
    p50: float
    p95: float
    p99: float
    max: float

    @property
    def mean(self) -> float:
        """Of the values."""
        return self.total / self.count


def distribution(values: NDArray[Any]) -> Distribution | None:
    """The distribution of the values that are numbers; None when there is none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Distribution(len(values), float(values.sum(dtype=np.float64)), p50, p95, p99, float(values.max()))


def union(starts: Floats, ends: Floats) -> Intervals:
    """Intervals in any order as disjoint ones in order of time: overlapping ones are joined, NaN left out."""
    known = ~(np.isnan(starts) | np.isnan(ends))
    starts, ends = starts[known], ends[known]
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    if not len(starts):
        return starts, reach
    new = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((new[1:], [True]))
    return starts[new], reach[last]


def covered(intervals: Intervals, since: Floats, until: Floats) -> Floats:
    """For each window, how much of it the disjoint, ordered intervals cover."""
    starts, ends = intervals
    total = np.concatenate(([0.0], np.cumsum(ends - starts)))

    def until_time(time: Floats) -> Floats:
        index = np.searchsorted(starts, time, side="right")
        over = np.where(index > 0, np.maximum(0.0, ends[np.maximum(index, 1) - 1] - time), 0.0) if len(ends) else 0.0
        return np.asarray(total[index] - over, np.float64)

    return until_time(until) - until_time(since)


def length(intervals: Intervals) -> float:
    """How long disjoint intervals are together."""
    return float((intervals[1] - intervals[0]).sum())


def joined(*parts: Intervals) -> Intervals:
    """Everything that at least one of the sets covers."""
    return union(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))


def common(a: Intervals, b: Intervals) -> Intervals:
    """What both cover."""
    marks = np.concatenate((a[0], b[0], a[1], b[1]))
    change = np.concatenate((np.ones(len(a[0]) + len(b[0])), -np.ones(len(a[1]) + len(b[1]))))
    order = np.lexsort((change, marks))  # ends first: what only touches has nothing in common
    depth = np.cumsum(change[order])
    begins = np.flatnonzero(depth == 2)
    times = marks[order]
    starts, ends = times[begins], times[begins + 1] if len(begins) else times[:0]
    longer = ends > starts
    return starts[longer], ends[longer]


def without(a: Intervals, b: Intervals) -> Intervals:
    """What a covers and b does not."""
    if not len(a[0]):
        return a
    outside = np.concatenate(([-np.inf], b[1])), np.concatenate((b[0], [np.inf]))
    return common(a, outside)


def inside(a: Intervals, since: float, until: float) -> Intervals:
    """The part of a between two times."""
    return common(a, (np.array([since]), np.array([until])))


def group_medians(values: NDArray[Any], groups: NDArray[np.intp], count: int) -> Floats:
    """The (lower) median of each of ``count`` groups without its NaN values; NaN where there are no others."""
    known = ~np.isnan(values)
    values, groups = values[known], groups[known]
    values = values[np.lexsort((values, groups))]
    sizes = np.bincount(groups, minlength=count)
    middle = np.cumsum(sizes) - sizes + (sizes - 1) // 2
    found = np.full(count, np.nan)
    found[sizes > 0] = values[middle[sizes > 0]]
    return found


def batch_numbers(start: Floats, exchange: Floats) -> NDArray[np.intp]:
    """Which fused operations went through the fusion buffer together, as a number per operation.

    Horovod's background thread writes the start of every operation of a batch before it starts the one collective of
    the batch, and a later batch starts after that. On GPUs another thread writes the collectives, so that a batch may
    start while the one before waits for its own; but its collective starts after that of the one before has ended.

    Args:
        start: of the operations, in order of time.
        exchange: (rows, 2) start and end of their collectives.
    """
    later = (start[1:] > exchange[:-1, 0]) | (exchange[1:, 0] > exchange[:-1, 1])
    return np.concatenate(([0], np.cumsum(later))).astype(np.intp)


def repeating(counts: Sequence[int]) -> list[int]:
    """The largest group of tensors that appear equally often, three times or more: those of a training step.

    Returns:
        Indices into ``counts``; of several groups the one with the most operations. Counts may differ by two in a
        hundred or by one, because the file may end within a step.
    """
    best: list[int] = []
    for count in sorted({count for count in counts if count >= 3}, reverse=True):
        slack = max(1, count // 50)
        group = [index for index, other in enumerate(counts) if count - slack <= other <= count]
        if sum(counts[index] for index in group) > sum(counts[index] for index in best):
            best = group
    return best


def step_numbers(tensor: NDArray[np.int32]) -> NDArray[np.intp]:
    """The step of each operation, in order of time: one starts with the first tensor that the last one has already."""
    numbers = np.empty(len(tensor), np.intp)
    seen: set[int] = set()
    step = 0
    for index, value in enumerate(tensor.tolist()):
        if value in seen:
            step += 1
            seen = set()
        seen.add(value)
        numbers[index] = step
    return numbers
