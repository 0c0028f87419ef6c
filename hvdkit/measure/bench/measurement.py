"""One job: seconds per step, where they go, and what came before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from hvdkit.common.json_files import Part, Positive, Seconds
from hvdkit.errors import DataError
from hvdkit.observe.lateness import Floats
from hvdkit.read.causes import Cause
from hvdkit.read.explain import step_causes
from hvdkit.read.explain.step_table import LEAST
from hvdkit.steps.step_files import RankTimes


class Parts(Part, frozen=True):
    """Where a step goes: seconds per step, the mean over steps and ranks; the parts add up to the step.

    Attributes:
        input: until the batch was there.
        compute: the rank's own work; where ``communication`` is None, with the exchange and the wait inside of it.
        communication: after the last rank was ready, the update of the weights with it; None where the ranks did not
            say when they were.
        wait: for ranks that were slower in this step.
    """

    input: float
    compute: float
    communication: float | None
    wait: float


class Slowest(Part, frozen=True):
    """The rank that was most often the last of a step.

    Attributes:
        rank: which.
        share: of the steps, from 0 to 1.
    """

    rank: int
    share: float


class JobSteps(Part, frozen=True):
    """The steps of one job, without the warm-up.

    Attributes:
        count: steps of one rank, the warm-up included.
        step_s: mean seconds of a step, each as long as that of its slowest rank.
        median_s, p95_s: of the same steps.
        startup_s: from the start of the job until its last rank asked for its first batch.
        first_step_s: of the first step.
        parts: see ``Parts``.
        slowest: None with one rank, and where the ranks did not say when they were ready: they end a step together,
            so that its length does not tell which of them was late.
        causes: what costs these steps time, as ``hvdkit explain`` has it; None where it cannot tell: of one rank, or of
            too few steps.
    """

    count: Positive
    step_s: Annotated[float, msgspec.Meta(gt=0)]
    median_s: Seconds
    p95_s: Seconds
    startup_s: Seconds
    first_step_s: Seconds
    parts: Parts
    slowest: Slowest | None
    causes: tuple[Cause, ...] | None = None


def measure(times: Sequence[RankTimes], ranks: int, started: float, warmup_steps: int) -> JobSteps:
    """What the steps that all ranks of a job recorded say.

    A step ends on all ranks at the same time, when they exchange gradients: clocks of different hosts are compared
    nowhere but in ``startup_s``.

    Args:
        times: of each rank, by rank.
        ranks: how many the job had.
        started: when the job was started, seconds since the epoch of Unix.
        warmup_steps: how many of the first steps are left out, >= 0.
    Raises:
        DataError: ranks are missing, took different numbers of steps, too few, or steps without any length.
    """
    counts = [len(rank.steps) for rank in times]
    if [rank.rank for rank in times] != list(range(ranks)):
        raise DataError(
            f"recorded the steps of ranks {[rank.rank for rank in times]}, not of {ranks} rank{'s' * (ranks > 1)}"
        )
    if len(set(counts)) > 1:
        raise DataError(f"its ranks took different numbers of steps: {counts}")
    if counts[0] <= warmup_steps:
        raise DataError(
            f"took {counts[0]} steps, of which {warmup_steps} are warm-up; train longer, or lower --warmup-steps"
        )
    moments = np.array(
        [[(s.asked, s.given, np.nan if s.ready is None else s.ready, s.ended) for s in rank.steps] for rank in times]
    )
    asked, given, ready, ended = np.moveaxis(moments, 2, 0)
    lengths = (ended - asked).max(axis=0)
    kept = lengths[warmup_steps:]
    if kept.mean() <= 0:
        raise DataError("recorded steps that take no time; do the work of a step inside of the loop")
    known = not np.isnan(ready[:, warmup_steps:]).any()
    waiting, computing = (part[:, warmup_steps:] for part in (given - asked, (ready if known else ended) - given))
    return JobSteps(
        count=counts[0],
        step_s=float(kept.mean()),
        median_s=float(np.median(kept)),
        p95_s=float(np.percentile(kept, 95)),
        startup_s=max(0.0, float(asked[:, 0].max()) - started),
        first_step_s=float(lengths[0]),
        parts=_parts(waiting, computing, kept, known),
        slowest=_slowest(waiting + computing) if ranks > 1 and known else None,
        causes=tuple(step_causes.look(times, Path("steps")).causes) if ranks > 1 and counts[0] >= LEAST else None,
    )


def _parts(waiting: Floats, computing: Floats, lengths: Floats, known: bool) -> Parts:
    """Ranks that are ready sooner than the last one wait for it; the rest of the step is common to all."""
    own = waiting + computing
    last = own.max(axis=0) if known else lengths
    return Parts(
        input=float(waiting.mean()),
        compute=float(computing.mean()),
        communication=float((lengths - last).mean()) if known else None,
        wait=float((last - own).mean()),
    )


def _slowest(own: Floats) -> Slowest:
    times = np.bincount(own.argmax(axis=0), minlength=len(own))
    return Slowest(int(times.argmax()), float(times.max() / times.sum()))
