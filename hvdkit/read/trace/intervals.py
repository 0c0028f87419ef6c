"""Sets of time: disjoint intervals in order, what they have in common and what is left of one without another."""

from __future__ import annotations

import numpy as np

from hvdkit.read.timeline.measures import Floats, union

Intervals = tuple[Floats, Floats]
"""Starts and ends of disjoint intervals, in order; any unit."""


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
