"""How far the ranks are apart when they meet, from how long each was in a collective: no clock is compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdkit.common import lateness
from hvdkit.read.trace.columns import TraceColumns
from hvdkit.read.trace.kinds import Kind, Source
from hvdkit.read.trace.results import RankTrace, TraceRankSkew, TraceSkew, TraceStep

Key = tuple[int, str, int]
"""Step, name of the collective, and the how many-th of this name in the step."""


Waits = dict[Key, float]
"""Milliseconds that a rank was in each collective."""


def collectives(columns: TraceColumns, steps: Sequence[TraceStep], since: float) -> Waits:
    """The collectives of one rank in its steps, which its peers have under the same key."""
    rows = np.flatnonzero(_blocking(columns))
    rows = rows[np.argsort(columns.start[rows], kind="stable")]
    begins = np.array([step.begin * 1e3 + since for step in steps])
    counts: dict[tuple[int, str], int] = {}
    times: Waits = {}
    for row in rows.tolist():
        at = int(np.searchsorted(begins, columns.start[row] + 1e-3, side="right")) - 1
        if steps and at < 0:
            continue
        key = (steps[at].number if steps else 0), columns.names[int(columns.name[row])]
        counts[key] = counts.get(key, 0) + 1
        times[*key, counts[key]] = float(columns.end[row] - columns.start[row]) / 1e3
    return times


def _blocking(columns: TraceColumns) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Events that end on all ranks together: kernels that communicate, else Gloo's and MPI's, else hvdkit's waits."""
    kernels = (columns.source == Source.KERNEL) & (columns.kind == Kind.COMMUNICATION)
    if kernels.any():
        return np.asarray(kernels)
    background = (columns.kind == Kind.BACKGROUND) & (columns.source != Source.HOROVOD)
    if background.any():
        return np.asarray(background)
    waits = np.array([name.startswith("hvdkit:") for name in columns.names], bool)[columns.name]
    return np.asarray(waits & (columns.kind == Kind.COMMUNICATION))


def between(found: Sequence[tuple[RankTrace, Waits]]) -> tuple[TraceSkew | None, str]:
    """The skew of all ranks, or None and why it cannot be told."""
    if len(found) < 2:
        return None, "one trace only: give those of all ranks"
    if any(rank.rank is None for rank, _ in found):
        return None, "a trace does not say whose it is: name them trace-R-of-N.json"
    keys = set(found[0][1])
    for _, waits in found[1:]:
        keys &= set(waits)
    if not keys:
        return None, "no collective that all traces have in the same step"
    ordered = sorted(keys)
    table = np.array([[waits[key] for key in ordered] for _, waits in found])  # (ranks, collectives)
    late = table.max(axis=0) - table
    apart = late.max(axis=0)
    last = np.argmin(table, axis=0)
    # Several collectives of a step can wait for one rank at the same time: the longest of these waits counts.
    begins = np.flatnonzero(np.diff([key[0] for key in ordered], prepend=ordered[0][0] - 1))
    costs = lateness.costs(np.maximum.reduceat(late, begins, axis=1))
    waits = np.maximum.reduceat(table - table.min(axis=0), begins, axis=1).mean(axis=1)
    rows = [
        TraceRankSkew(
            rank.rank or 0,
            rank.times.computation / max(1, len(rank.steps)),
            int(np.sum((last == index) & (apart > 0))),
            float(late[index].mean()),
            float(waits[index]),
            float(costs[index]),
        )
        for index, (rank, _) in enumerate(found)
    ]
    return TraceSkew(len(ordered), float(np.median(apart)), float(apart.max()), tuple(rows)), ""
