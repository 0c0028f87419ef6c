"""The jobs of a measurement: which one runs next, how it runs, and what its steps say."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hvdkit.common import json_files
from hvdkit.common.units import ranks_text
from hvdkit.core import listeners
from hvdkit.errors import DataError, LaunchError
from hvdkit.jobs.trials import DEFAULT, Launch, TrialJob
from hvdkit.measure.bench.results import JobSteps, MeasuredJob, Parts, ScalingAsked, ScalingResults, measurable
from hvdkit.observe import step_files
from hvdkit.observe.step_files import RankTimes
from hvdkit.read.explain import step_causes, step_table

_WITHOUT_STEPS = (
    "COMMAND records no steps: the seconds of its closing line count, start-up and evaluation with them; write `for x, "
    "y in hk.record_steps(loader)` (Keras: the callback hk.RecordSteps()) to measure the steps"
)
_USELESS = (
    "neither recorded its steps (record_steps of the adapters) nor printed 'Hvd Procs N Total time: X second' with a "
    "time above 0"
)
_WHERE = Path("steps")
"""Of the evidence: the files are gone when it is read."""


def order(asked: ScalingAsked) -> list[tuple[int, int]]:
    """The jobs, (ranks, repeat), in the order of running: every round has each number of ranks once, at random."""
    rng = np.random.default_rng(0)
    return [
        (asked.ranks[index], repeat) for repeat in range(asked.repeats) for index in rng.permutation(len(asked.ranks))
    ]


def go(
    results: ScalingResults,
    output: Path,
    launch: Callable[[int], Launch],
    timeout_s: float | None,
    say: Callable[[str], None],
) -> None:
    """Run the jobs that were asked for and are still missing.

    Args:
        results: what is measured already; the others are added.
        output: where they are kept after every job.
        launch: what runs on so many ranks.
        timeout_s: seconds after which a job has failed; None for no limit.
        say: is told sentences that a user should know.
    Raises:
        LaunchError: every job of the first round failed, so that nothing can be compared.
    """
    jobs = order(results.asked)
    done = {(job.ranks, job.repeat) for job in results.jobs}
    if done:
        say(f"goes on after {len(done)} of {len(jobs)} jobs that are measured already")
    for ranks, repeat in jobs:
        if (ranks, repeat) in done:
            continue
        say(f"job {len(results.jobs) + 1} of {len(jobs)}: {ranks_text(ranks)}, repeat {repeat + 1}")
        job, steps = run_job(launch(ranks), results.asked.warmup_steps, output.absolute().parent, timeout_s)
        closing_s = job.closing_s if measurable(job.closing_s) else None
        useless = _USELESS if closing_s is None and steps is None else None
        measured = MeasuredJob(ranks, repeat, job.wall_s, closing_s, steps, job.failure or useless)
        results.jobs.append(measured)
        json_files.write(output, results)
        if measured.failure is None and steps is None and len(results.counted()) == 1:
            say(_WITHOUT_STEPS)
        if measured.failure is not None:
            say(f"job {len(results.jobs)} failed and is left out: it {measured.failure}")
        if len(results.jobs) == len(results.asked.ranks) and not results.counted():
            raise LaunchError("Every job of the first round failed, so that nothing can be compared.")


def run_job(
    launch: Launch, warmup_steps: int, directory: Path, timeout_s: float | None = None
) -> tuple[TrialJob, JobSteps | None]:
    """Run one job and read the steps that its ranks recorded; None where they recorded none or the job failed.

    Args:
        launch: what runs, on how many ranks.
        warmup_steps: first steps that are left out.
        directory: where the ranks write for the while; on several hosts, shared by all.
        timeout_s: seconds after which the job has failed; None for no limit.
    Raises:
        KeyboardInterrupt: by Ctrl-C; the job was ended.
    """
    with tempfile.TemporaryDirectory(dir=directory, prefix=".hvdkit-bench-") as name:
        folder, started = Path(name).absolute(), time.time()
        told = replace(launch, options=(*launch.options, "--env", f"{listeners.STEP_TIMES}={folder}"))
        job = told(DEFAULT, timeout_s)
        if job.failure is not None:
            return job, None
        try:
            times = step_files.read(folder)
            return job, measure(times, launch.n, started, warmup_steps) if times else None
        except DataError as error:
            return TrialJob(job.wall_s, job.closing_s, str(error)), None


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
