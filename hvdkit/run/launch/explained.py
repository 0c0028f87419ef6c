"""What a job of ``hvdkit launch --explain-job`` gets, and what is said of it at its end."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvdkit.common import json_files
from hvdkit.errors import HvdkitError, InvalidArgumentError
from hvdkit.run.launch import recordings, torch_profile
from hvdkit.run.launch.machine import usable_cores
from hvdkit.run.launch.model import LaunchPlan, Request, Setting
from hvdkit.steps import step_marks, step_times

_STEPS = "steps"
_FILES = "rank-*.jsonl"


def settings(request: Request, environ: Mapping[str, str]) -> list[Setting]:
    """What the ranks are told. A timeline of some steps is recorded, unless one is already."""
    directory = request.explain_job
    if directory is None:
        return []
    timeline = str(request.timeline or environ.get("HOROVOD_TIMELINE", ""))
    given = {**environ, "HOROVOD_TIMELINE": timeline, **request.variables}
    recorded = bool(given["HOROVOD_TIMELINE"])
    variables = {
        **({} if recorded else {"HOROVOD_TIMELINE": "DYNAMIC"}),
        step_times.VARIABLE: str(directory / _STEPS),
        step_marks.VARIABLE: "1" if recorded else str(directory / "timeline.json"),
        "PYTHONPATH": torch_profile.with_ours(given.get("PYTHONPATH", "")),
    }
    return [Setting("--explain-job: each rank writes there when its steps begin and end", variables=variables)]


def prepare(directory: Path, job: LaunchPlan) -> None:
    """Make the directory, and say in it how the job is started.

    Raises:
        InvalidArgumentError: it cannot be made, or holds the times of another job.
    """
    from hvdkit.read.explain.launched import NAME, JobLaunch  # not at the top: every launch would pay for it

    if recordings.prepare("--explain-dir", directory / _STEPS, _FILES):
        raise InvalidArgumentError(
            f"--explain-dir {directory} holds the recordings of another job; give a new directory, or remove it."
        )
    threads = job.environment.get("OMP_NUM_THREADS", "")
    ranks_on_a_host = max((host.slots for host in job.hosts), default=None) if job.direct else job.n
    launched = JobLaunch(
        job.n,
        job.launcher_name,
        usable_cores(),
        ranks_on_a_host,
        int(threads) if threads.isdigit() and int(threads) else None,
        {name: value for name, value in sorted(job.environment.items()) if name.startswith("HOROVOD_")},
    )
    json_files.write(directory / NAME, launched)


def outcome(directory: Path, also: Iterable[Path | None]) -> str:
    """What is said of the job, some lines.

    Args:
        directory: of ``prepare``.
        also: other recordings of the same job, where they are.
    """
    from hvdkit.read.explain import explain
    from hvdkit.read.explain.show import lines

    if not any((directory / _STEPS).glob(_FILES)):
        return (
            "hvdkit launch: no rank recorded its steps: none took one of a PyTorch optimizer, of a loop over tf.data "
            "or of Keras' fit; put record_steps around its loop."
        )
    paths = [directory, *(path for path in also if path is not None and path.exists())]
    try:
        found = lines(explain(paths))
    except HvdkitError as error:
        return f"hvdkit launch: the job cannot be explained: {error}"
    words = shlex.join(map(str, paths))
    return "\n".join([f"hvdkit launch: what this job's time went to, by 'hvdkit explain {words}':", *found])
