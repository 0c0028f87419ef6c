"""The part of a recording that the report draws operation by operation: its choice, its limits, its data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdkit.common.drawing import shown_name
from hvdkit.errors import InvalidArgumentError
from hvdkit.read.timeline.measures import Floats, step_window
from hvdkit.read.timeline.model import GROUPS, CycleMark, Operation, group_of
from hvdkit.read.timeline.reader import Recording
from hvdkit.read.timeline.results import TimelineSummary

OPERATIONS = 3000
"""How many operations a page holds when nothing else is said: about 450 kB."""
TENSORS = 20
"""How many tensors it lists when nothing else is said."""
STEPS = 3
"""How many steps are drawn when no part is chosen."""
CYCLES = 4000
PHASES = 64
SLACK = 1e6
TICKS = 64


@dataclass
class Lanes:
    """The operations of a window, in the order in which they began; times in microseconds.

    Attributes:
        origin: when the recording began, from which people count.
        first, last: the window that was asked for.
        chosen: in words, which part of the recording it is.
        shown_until: up to where it is complete: ``last``, or less where it holds too many operations.
        total: how many operations touch the window.
        operations: those that are kept.
        cycles: when cycles started in it; not all where there are very many.
        steps: number and start of the steps that start in it.
    """

    origin: float
    first: float
    last: float
    chosen: str
    shown_until: float
    total: int
    operations: list[Operation]
    cycles: list[float]
    steps: list[tuple[int, float]] = field(default_factory=list)

    @property
    def left_out(self) -> int:
        """How many operations of the window are not kept."""
        return self.total - len(self.operations)

    @property
    def names(self) -> list[str]:
        """The tensors, in the order in which they first appear."""
        return list(dict.fromkeys(operation.tensor for operation in self.operations))


def choose_window(
    summary: TimelineSummary, since: float | None, until: float | None, step: int | None
) -> tuple[float, float, str]:
    """The start and the end of the part to draw, in microseconds, and in words which part that is.

    Args:
        summary: of the whole recording.
        since, until: seconds since the first event of the recording.
        step: a training step, from 0. Without any of the three: some steps of usual length, or everything.
    Raises:
        InvalidArgumentError: there is no such step, or ``since`` is not before ``until``.
    """
    begins = [] if summary.steps is None else summary.steps.begins.tolist()
    begin, end = summary.origin + summary.since, summary.origin + summary.until + 1.0
    if step is not None:
        if since is not None or until is not None:
            raise InvalidArgumentError(
                f"step is {step} and since or until is given too; expected either a step or a part in seconds."
            )
        return *step_window(begins, step, end), f"step {step}"
    if since is not None or until is not None:
        first = begin if since is None else summary.origin + since * 1e6
        last = end if until is None else summary.origin + until * 1e6
        if not (math.isfinite(first) and math.isfinite(last) and first < last):
            raise InvalidArgumentError(
                f"since is {since} and until {until}; expected since before until, in seconds since the first event. "
                f"The recording has operations from {summary.since / 1e6:.6g} to {summary.until / 1e6:.6g} s."
            )
        return first, last, "the part that was asked for"
    if summary.steps is None or summary.steps.duration is None or len(begins) < 3:
        return begin, end, "the whole recording"
    start, stop = _usual_steps(summary.steps.durations, summary.steps.duration.p50)
    steps = f"step {start}" if stop == start + 1 else f"steps {start} to {stop - 1}"
    return begins[start], begins[stop], f"{steps}, of usual length"


def _usual_steps(durations: Floats, usual: float) -> tuple[int, int]:
    """The first run of STEPS steps after the first step that takes about as long as usual, or the nearest to that."""
    length = min(STEPS, len(durations) - 1)
    sums = np.convolve(durations[1:], np.ones(length), "valid")
    away = np.abs(sums - length * usual)
    near = np.flatnonzero(away <= 0.02 * length * usual)
    start = 1 + int(near[0] if len(near) else away.argmin())
    return start, start + length


def collect_lanes(
    recording: Recording, window: tuple[float, float, str], summary: TimelineSummary, limit: int = OPERATIONS
) -> Lanes:
    """Reads the recording once and keeps the operations of the window: the earliest ones where there are too many.

    Args:
        recording: read as a stream; at most twice ``limit`` operations are in memory.
        window: of ``choose_window``.
        summary: for the starts of the steps.
        limit: number of operations to keep, at least 1.
    """
    first, last, chosen = window
    kept: list[Operation] = []
    cycles: list[float] = []
    total = 0
    cut = math.inf
    for batch in _up_to(recording, last, summary):
        for item in batch:
            if isinstance(item, CycleMark):
                if first <= item.time <= last and len(cycles) < CYCLES:
                    cycles.append(item.time)
            elif item.begin < last and item.end >= first:
                total += 1
                if item.begin < cut:
                    kept.append(item)
        if len(kept) > 2 * limit:
            cut = min(cut, _earliest(kept, limit))
    cut = min(cut, _earliest(kept, limit)) if len(kept) > limit else cut
    steps = [] if summary.steps is None else summary.steps.begins.tolist()
    return Lanes(
        origin=summary.origin,
        first=first,
        last=last,
        chosen=chosen,
        shown_until=min(last, max(cut, first)),
        total=total,
        operations=sorted(kept, key=lambda operation: operation.begin),
        cycles=cycles,
        steps=[(index, begin) for index, begin in enumerate(steps) if first <= begin <= last],
    )


def _up_to(recording: Recording, last: float, summary: TimelineSummary) -> Iterator[list[Operation | CycleMark]]:
    """The recording up to where no operation can follow that began before ``last``: the file is in order of time."""
    longest = max((one.phases["whole"].max for one in summary.tensors if "whole" in one.phases), default=0.0)
    for batch in recording.batches():
        yield batch
        ends = (item.end for item in reversed(batch) if isinstance(item, Operation))
        if next(ends, 0.0) > last + longest + SLACK:
            return


def _earliest(operations: list[Operation], limit: int) -> float:
    """Keeps the operations that began first; returns when the first one began that is given up."""
    operations.sort(key=lambda operation: operation.begin)
    given_up = operations[limit].begin
    del operations[limit:]
    return given_up


def lane_data(lanes: Lanes) -> dict[str, Any]:
    """What the script of the page draws: numbers and names only; times in microseconds since ``first``.

    An operation is [lane, kind, begin, end of negotiation or null, start, end, bytes or null, [phase, start, end, ...],
    last rank or null, its lateness].
    """
    names = lanes.names
    lane_of = {name: index for index, name in enumerate(names)}
    words: dict[str, int] = {}
    first = lanes.first

    def word(text: str) -> int:
        return words.setdefault(shown_name(text), len(words))

    def after(time: float) -> float:
        return round(time - first, 1)

    operations = []
    for operation in lanes.operations:
        phases: list[float] = []
        for phase in sorted(operation.phases[:PHASES], key=lambda one: one.start):
            phases += (word(phase.name), after(phase.start), after(phase.end))
        late = sorted(operation.ticks.items(), key=lambda tick: tick[1])[-TICKS:]
        operations.append(
            [
                lane_of[operation.tensor],
                word(operation.kind),
                after(operation.begin),
                None if operation.negotiate_end is None else after(operation.negotiate_end),
                after(operation.start),
                after(operation.end),
                operation.bytes,
                phases,
                late[-1][0] if len(late) > 1 else None,
                round(late[-1][1] - late[0][1], 1) if len(late) > 1 else 0,
            ]
        )
    return {
        "origin": round(first - lanes.origin, 1),
        "length": round(max(lanes.shown_until - first, 1.0), 1),
        "lanes": [shown_name(name) for name in names],
        "words": list(words),
        "groups": [GROUPS.index(group_of(text)) for text in words],
        "operations": operations,
        "cycles": [after(time) for time in lanes.cycles if time <= lanes.shown_until],
        "steps": [[number, after(begin)] for number, begin in lanes.steps if begin <= lanes.shown_until],
    }
