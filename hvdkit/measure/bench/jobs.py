"""The jobs of a measurement: which one runs next, how it runs, and what becomes of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdkit.common.units import ranks_text
from hvdkit.core import listeners
from hvdkit.errors import DataError, LaunchError
from hvdkit.jobs.trials import DEFAULT, Launch, TrialJob
from hvdkit.measure.bench.measurement import JobSteps, measure
from hvdkit.measure.bench.results import MeasuredJob, ScalingResults, measurable
from hvdkit.measure.bench.subject import ScalingAsked
from hvdkit.observe import step_files

Run = Callable[[int], tuple[TrialJob, JobSteps | None]]
"""Runs the job on so many ranks; the steps are None where none were recorded or the job failed."""
Say = Callable[[str], None]
"""Is told a sentence that a user should know."""
_WITHOUT_STEPS = (
    "COMMAND records no steps: the seconds of its closing line count, start-up and evaluation with them; write `for x, "
    "y in hk.record_steps(loader)` (Keras: the callback hk.RecordSteps()) to measure the steps"
)
_USELESS = (
    "neither recorded its steps (record_steps of the adapters) nor printed 'Hvd Procs N Total time: X second' with a "
    "time above 0"
)


@dataclass(frozen=True, slots=True)
class Jobs:
    """Runs jobs through ``hvdkit launch`` and reads what their ranks recorded.

    Attributes:
        command: what each rank runs.
        options: of ``hvdkit launch``, by number of ranks.
        warmup_steps: first steps that are left out.
        directory: where the ranks write for the while; on several hosts, shared by all.
        timeout_s: seconds after which a job has failed; None for no limit.
    """

    command: Sequence[str]
    options: Callable[[int], Sequence[str]]
    warmup_steps: int
    directory: Path
    timeout_s: float | None = None

    def __call__(self, ranks: int) -> tuple[TrialJob, JobSteps | None]:
        """Run one job.

        Raises:
            KeyboardInterrupt: by Ctrl-C; the job was ended.
        """
        with tempfile.TemporaryDirectory(dir=self.directory, prefix=".hvdkit-bench-") as name:
            folder, started = Path(name).absolute(), time.time()
            options = (*self.options(ranks), "--env", f"{listeners.STEP_TIMES}={folder}")
            job = Launch(ranks, self.command, options)(DEFAULT, self.timeout_s)
            if job.failure is not None:
                return job, None
            try:
                times = step_files.read(folder)
                return job, measure(times, ranks, started, self.warmup_steps) if times else None
            except DataError as error:
                return TrialJob(job.wall_s, job.closing_s, str(error)), None


def order(asked: ScalingAsked) -> list[tuple[int, int]]:
    """The jobs, (ranks, repeat), in the order of running: every round has each number of ranks once, at random."""
    rng = np.random.default_rng(0)
    return [
        (asked.ranks[index], repeat) for repeat in range(asked.repeats) for index in rng.permutation(len(asked.ranks))
    ]


def go(run: Run, results: ScalingResults, keep: Callable[[], None], say: Say) -> None:
    """Run the jobs that were asked for and are still missing.

    Args:
        run: runs one job.
        results: what is measured already; the others are added.
        keep: is called after every job.
        say: is told what happens.
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
        job, steps = run(ranks)
        closing_s = job.closing_s if measurable(job.closing_s) else None
        useless = _USELESS if closing_s is None and steps is None else None
        measured = MeasuredJob(ranks, repeat, job.wall_s, closing_s, steps, job.failure or useless)
        results.jobs.append(measured)
        keep()
        if measured.failure is None and steps is None and len(results.counted()) == 1:
            say(_WITHOUT_STEPS)
        if measured.failure is not None:
            say(f"job {len(results.jobs)} failed and is left out: it {measured.failure}")
        if len(results.jobs) == len(results.asked.ranks) and not results.counted():
            raise LaunchError("Every job of the first round failed, so that nothing can be compared.")
