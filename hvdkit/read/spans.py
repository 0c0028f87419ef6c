"""When something was going on: disjoint intervals of time, in any unit, and what they cover together."""

from __future__ import annotations

import numpy as np

from hvdkit.observe.lateness import Floats

Intervals = tuple[Floats, Floats]
"""Starts and ends of disjoint intervals, in order."""


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
