"""Finds the MPI launcher to use and says whose it is."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.run.launch.model import Mpi

PROGRAMS = ("mpirun", "mpiexec")

_VERSION_LINES = (
    ("Open MPI", re.compile(r"\(Open MPI\) (\d+(?:\.\d+)*)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*Version (\d+(?:\.\d+)*)")),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+(\d+(?:\.\d+)*)")),
)
_TIMEOUT_S = 30


def find_mpirun(search_path: str) -> Path | None:
    """Absolute path of the first mpirun (or else mpiexec) on a search path such as PATH, None without one."""
    for program in PROGRAMS:
        found = shutil.which(program, path=search_path)
        if found is not None:
            return Path(found).absolute()
    return None


def identify(mpirun: Path, text: str) -> Mpi:
    """Whose mpirun it is.

    Args:
        mpirun: its path.
        text: what it prints for ``--version``.
    Raises:
        LaunchError: neither Open MPI's nor Hydra.
    """
    for implementation, pattern in _VERSION_LINES:
        match = pattern.search(text)
        if match is not None:
            return Mpi(mpirun, implementation, tuple(int(part) for part in match[1].split(".")))
    first_line = next(iter(text.strip().splitlines()), "")
    raise LaunchError(
        f"{mpirun} is neither Open MPI's nor MPICH's or Intel MPI's (Hydra): its --version says {first_line!r}; put "
        "the directory of one of these first on PATH, or use --launcher horovodrun."
    )


def ask(mpirun: Path, environment: Mapping[str, str]) -> Mpi:
    """Run ``mpirun --version`` and identify it.

    Raises:
        LaunchError: it cannot be run, does not answer, or is of an unknown kind.
    """
    try:
        text = version_text(mpirun, environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"'{mpirun} --version' failed: {error}; repair this MPI or use --launcher horovodrun."
        ) from error
    return identify(mpirun, text)


def version_text(program: Path, environment: Mapping[str, str]) -> str:
    """What a program prints for ``--version``, on standard output and then on standard error.

    Raises:
        OSError, subprocess.TimeoutExpired: it cannot be run, or does not answer.
    """
    answer = subprocess.run(
        [program, "--version"],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_S,
        check=False,
    )
    return answer.stdout + answer.stderr
