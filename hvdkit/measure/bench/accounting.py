"""Where the steps of a job went that also recorded Horovod's timeline: its steps cut along both recordings.

The recorder of the steps says when rank 0 worked, waited and exchanged; the timeline says what Horovod did meanwhile.
Both clocks count from 1970 on rank 0's host, so nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdkit.common.json_files import Part, Seconds
from hvdkit.errors import DataError
from hvdkit.measure.bench.measurement import Parts
from hvdkit.read.timeline import columns, measures, summary
from hvdkit.read.timeline.model import Operation, group_of
from hvdkit.read.timeline.reader import Recording, read
from hvdkit.steps.step_files import RankTimes

TRANSFER, COPY_IN, COPY_OUT, OTHER, NEGOTIATION, NOTHING = (
    "transfer", "copy_in", "copy_out", "other", "negotiation", "nothing",
)  # fmt: skip
ACTIVITIES = (NEGOTIATION, COPY_IN, TRANSFER, COPY_OUT, OTHER, NOTHING)
"""What Horovod does at a time, in the order of an operation; ``NOTHING``: no tensor is announced or under way."""
_FIRST_COUNTS = (TRANSFER, COPY_IN, COPY_OUT, OTHER, NEGOTIATION)
"""Of several at the same time, for different tensors, the first of these counts."""
WORKING, WAITING, EXPOSED, WHOLE = "working", "waiting", "exposed", "step"
_AboveZero = Annotated[float, msgspec.Meta(gt=0)]
TOLERANCE = 0.05
"""How far the parts may be off the time of a step, as a share of it."""
_Floats = NDArray[np.float64]


class StepWindow(Part, frozen=True):
    """A part of rank 0's steps and what Horovod did in it.

    Attributes:
        name: "working" (input and computation: what runs here is hidden), "waiting" (for slower ranks), "exposed"
            (after the last rank was ready), or "step" where the ranks did not say when they were ready.
        seconds: of a step, the mean.
        activities: the same seconds by what Horovod did; they add up to ``seconds``.
    """

    name: Annotated[str, msgspec.Meta(pattern="^(working|waiting|exposed|step)$")]
    seconds: Seconds
    activities: dict[str, Seconds]

    def __post_init__(self) -> None:
        if self.activities.keys() != set(ACTIVITIES):
            raise ValueError(f"activities are {', '.join(self.activities)}, expected {', '.join(ACTIVITIES)}")


class Accounting(Part, frozen=True):
    """Where the steps of rank 0 went, without the warm-up; seconds of a step, means.

    Attributes:
        steps: that count.
        step_s: as rank 0 recorded it.
        timeline_step_s: from the first tensor of one step to that of the next in the timeline, the time between
            epochs taken off; None where the timeline shows no steps.
        parts: rank 0's.
        windows: the steps, part by part.
    """

    steps: int
    step_s: _AboveZero
    timeline_step_s: _AboveZero | None
    parts: Parts
    windows: tuple[StepWindow, ...]

    @property
    def sum_s(self) -> float:
        """All activities of all windows together."""
        return sum(sum(window.activities.values()) for window in self.windows)

    @property
    def off(self) -> float:
        """How far the sum is off the step, by the recorder or by the timeline, whichever is farther; a share of it."""
        measured = [self.step_s] if self.timeline_step_s is None else [self.step_s, self.timeline_step_s]
        return max((self.sum_s / seconds - 1 for seconds in measured), key=abs)


def account(times: Sequence[RankTimes], timeline: Path, warmup_steps: int) -> Accounting:
    """Set the steps of a job against its timeline.

    Args:
        times: of each rank, by rank, all with the same number of steps, more than ``warmup_steps``.
        timeline: the file that rank 0 wrote in the same job.
        warmup_steps: how many of the first steps are left out, >= 0.
    Raises:
        DataError: the timeline is missing, damaged, without the time of its start, or has nothing in these steps.
    """
    if not timeline.is_file():
        raise DataError("wrote no timeline on the host where hvdkit bench runs, to the directory of its -o")
    recording = read(timeline)
    busy = _intervals(recording)
    edges = _edges(times, warmup_steps)
    first, last = edges[0][1], edges[-1][2]
    step_s = float((last - first).mean())
    windows = tuple(_window(name, since, until, busy) for name, since, until in edges)
    if all(window.activities[NOTHING] >= window.seconds for window in windows):
        raise DataError("has a timeline in which no operation of Horovod lies in the steps that its ranks recorded")
    return Accounting(
        len(first), step_s, _timeline_step(recording, first, last), _parts(times, warmup_steps, edges), windows
    )


def _edges(times: Sequence[RankTimes], warmup_steps: int) -> list[tuple[str, _Floats, _Floats]]:
    """Name, begins and ends of the windows of rank 0's steps, seconds since the epoch of Unix.

    As in ``measurement``, when the last rank was ready is compared by the time since each rank's own begin of the step:
    clocks of different hosts differ.
    """
    kept = [rank.steps[warmup_steps:] for rank in times]
    asked, ended = (np.array([getattr(step, name) for step in kept[0]]) for name in ("asked", "ended"))
    if any(step.ready is None for steps in kept for step in steps):
        return [(WHOLE, asked, ended)]
    own = np.array([[(step.ready or step.asked) - step.asked for step in steps] for steps in kept])
    ready = asked + own[0]
    last = np.clip(asked + own.max(axis=0), ready, ended)
    return [(WORKING, asked, ready), (WAITING, ready, last), (EXPOSED, last, ended)]


def _parts(times: Sequence[RankTimes], warmup_steps: int, edges: Sequence[tuple[str, _Floats, _Floats]]) -> Parts:
    steps = times[0].steps[warmup_steps:]
    waited = float(np.mean([step.given - step.asked for step in steps]))
    means = [float((until - since).mean()) for _, since, until in edges]
    if len(means) == 1:
        return Parts(waited, means[0] - waited, None, 0.0)
    return Parts(waited, means[0] - waited, means[2], means[1])


def _intervals(recording: Recording) -> dict[str, tuple[_Floats, _Floats]]:
    """By activity, when it or one that counts before it takes place: disjoint, seconds since the epoch of Unix."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _FIRST_COUNTS}
    for operation in recording:
        for name, start, end in _activities(operation):
            found[name].append((start, end))
    begin = recording.start_time_since_epoch
    if begin is None:
        raise DataError("has a timeline that does not say when it was started")
    covering: list[tuple[float, float]] = []
    result = {}
    for name in _FIRST_COUNTS:
        covering += found[name]
        table = (np.array(covering).reshape(-1, 2) + begin) / 1e6
        result[name] = measures.union(table[:, 0], table[:, 1])
    return result


def _activities(operation: Operation) -> Iterable[tuple[str, float, float]]:
    names = {"collective": TRANSFER, "memcpy in": COPY_IN, "memcpy out": COPY_OUT}
    for phase in operation.phases:
        yield names.get(group_of(phase.name), OTHER), phase.start, phase.end
    yield OTHER, operation.start, operation.end
    yield NEGOTIATION, operation.begin, operation.start


def _window(name: str, since: _Floats, until: _Floats, busy: dict[str, tuple[_Floats, _Floats]]) -> StepWindow:
    seconds = float((until - since).mean())
    activities = dict.fromkeys(ACTIVITIES, 0.0)
    before = 0.0
    for activity in _FIRST_COUNTS:
        with_it = float(measures.covered(busy[activity], since, until).mean())
        activities[activity] = max(0.0, with_it - before)
        before = with_it
    activities[NOTHING] = max(0.0, seconds - before)
    return StepWindow(name, seconds, activities)


def _timeline_step(recording: Recording, first: _Floats, last: _Floats) -> float | None:
    """Seconds of a step by the timeline alone, within the steps that count."""
    table = columns.collect(recording)
    numbers, in_steps = summary.find_steps(table)
    if not in_steps.any() or recording.start_time_since_epoch is None:
        return None
    begins = table.begin[in_steps][np.unique(numbers[in_steps], return_index=True)[1]]
    begins = (begins + recording.start_time_since_epoch) / 1e6
    begins = begins[(begins >= first[0]) & (begins <= last[-1])]
    if len(begins) < 2:
        return None
    between = measures.covered((last[:-1], first[1:]), begins[:1], begins[-1:])
    seconds = float((begins[-1] - begins[0] - between[0]) / (len(begins) - 1))
    return seconds if seconds > 0 else None
