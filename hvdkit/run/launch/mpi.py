"""Finds the MPI launcher to use and says whose it is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from hvdkit.common import ask, mpi_names
from hvdkit.errors import LaunchError
from hvdkit.run.launch.model import Mpi

PROGRAMS = ("mpirun", "mpiexec")

_SUPPORTED = ("Open MPI", "Intel MPI", "MPICH")


def find_mpirun(search_path: str) -> Path | None:
    """Absolute path of the first mpirun (or else mpiexec) on a search path such as PATH, None without one."""
    for program in PROGRAMS:
        found = shutil.which(program, path=search_path)
        if found is not None:
            return Path(found).absolute()
    return None


def identify(mpirun: Path, environment: Mapping[str, str]) -> Mpi:
    """Whose mpirun it is, by what it prints for ``--version``.

    Raises:
        LaunchError: neither Open MPI's nor Hydra, or it cannot be run.
    """
    answer = ask.version(mpirun, environment)
    implementation, version = mpi_names.identify(answer.text)
    numbers = re.match(r"\d+(\.\d+)*", version)
    if implementation not in _SUPPORTED or numbers is None:
        raise LaunchError(
            f"{mpirun} is neither Open MPI's nor MPICH's or Intel MPI's (Hydra): its --version says "
            f"{answer.first_line!r}; put the directory of one of these first on PATH, or use --launcher horovodrun."
        )
    return Mpi(mpirun, implementation, tuple(map(int, numbers[0].split("."))))
