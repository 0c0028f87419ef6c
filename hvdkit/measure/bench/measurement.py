"""One job: seconds per step, where they go, and what came before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from hvdkit.common.json_files import Part, Positive, Seconds
from hvdkit.errors import DataError
from hvdkit.observe.step_files import RankTimes
from hvdkit.read.causes import Cause
from hvdkit.read.explain import step_causes, step_table

_WHERE = Path("steps")
"""Of the evidence: the files are gone when it is read."""


class Parts(Part, frozen=True):
    """Where a step goes: seconds per step, the mean over steps and ranks; the parts add up to the step.

    Attributes:
        between: from the allreduce of the step before until the rank asked for its batch: saving, evaluation, logging.
        input: until the batch was there.
        compute: the rank's own work; where ``communication`` is None, with the allreduce and the wait inside of it.
        communication: after the last rank was ready, until all have the gradients; None where the ranks did not say
            when they were ready.
        wait: for ranks that were slower in this step.
    """

    between: float
    input: float
    compute: float
    communication: float | None
    wait: float


class JobSteps(Part, frozen=True):
    """The steps of one job that train, without the warm-up.

    Attributes:
        count: steps of one rank, the warm-up included.
        step_s: mean seconds of a step, each as long as that of its slowest rank.
        startup_s: from the start of the job until its last rank asked for its first batch.
        first_step_s: of the first step.
        parts: see ``Parts``.
        causes: what costs these steps time, as ``hvdkit explain`` has it; None where it cannot tell: of one rank, or of
            too few steps.
    """

    count: Positive
    step_s: Annotated[float, msgspec.Meta(gt=0)]
    startup_s: Seconds
    first_step_s: Seconds
    parts: Parts
    causes: tuple[Cause, ...] | None = None


def measure(times: Sequence[RankTimes], ranks: int, started: float, warmup_steps: int) -> JobSteps:
    """What the steps that all ranks of a job recorded say.

    All ranks leave an allreduce at the same time: clocks of different hosts are compared nowhere but in ``startup_s``.

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
    try:
        job = step_table.table(times, _WHERE, warmup=warmup_steps, least=1)
    except DataError as error:
        raise DataError(f"recorded steps that cannot be used: {error}") from error
    causes = None
    if ranks > 1 and min(job.recorded) >= step_table.LEAST:
        causes = tuple(step_causes.look(times, _WHERE).causes)
    exchange = float(job.exchange.mean())
    return JobSteps(
        count=min(job.recorded),
        step_s=job.step_s,
        startup_s=max(0.0, max(rank.steps[0].asked for rank in times) - started),
        first_step_s=job.first[1],
        parts=Parts(
            between=float(job.parts["between"].mean()),
            input=float(job.parts["input"].mean()),
            compute=float(job.parts["work"].mean()) if job.ready else exchange,
            communication=exchange if job.ready else None,
            wait=float((job.own.max(axis=0) - job.own).mean()),
        ),
        causes=causes,
    )
