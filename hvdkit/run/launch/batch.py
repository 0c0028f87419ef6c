"""The launchers of batch systems: which are installed, and which one the batch job around this process calls for."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvdkit.common.ask import version
from hvdkit.steps.launchers import BATCH_JOBS

PROGRAMS = ("mpiexec", "aprun", "srun", "jsrun")
"""Launchers that belong to a batch system; mpiexec is that of PALS alone."""

_SYSTEMS = {"Slurm": "srun", "PBS": "mpiexec", "LSF": "jsrun", "Cobalt": "aprun"}


def called_for(environ: Mapping[str, str]) -> list[str]:
    """The launchers of the batch jobs around this process."""
    return [program for system, program in _SYSTEMS.items() if environ.get(BATCH_JOBS[system])]


def choice(environ: Mapping[str, str], programs: Mapping[str, Path]) -> tuple[str, str] | None:
    """The launcher that the batch job around this process calls for, and why; None where there is none.

    Args:
        environ: the environment of this process.
        programs: what ``installed`` found.
    """
    for system, program in _SYSTEMS.items():
        variable = BATCH_JOBS[system]
        if environ.get(variable) and program in programs:
            which = "PALS's mpiexec" if program == "mpiexec" else program
            return program, f"this is {system} job {environ[variable]} ({variable}), and {which} is installed"
    return None


def installed(wanted: Iterable[str], search_path: str, environ: Mapping[str, str]) -> dict[str, Path]:
    """Those of the wanted launchers that are on a search path such as PATH, by name."""
    found = {}
    for program in wanted:
        path = shutil.which(program, path=search_path)
        if path is not None and (program != "mpiexec" or is_pals(Path(path), environ)):
            found[program] = Path(path).absolute()
    return found


def is_pals(mpiexec: Path, environ: Mapping[str, str]) -> bool:
    """Whether an mpiexec is that of PALS: by the directory that it lies in, or by what it says of itself."""
    if "pals" in mpiexec.resolve().parts or "/pals/" in str(mpiexec):
        return True
    return "PALS" in version(mpiexec, environ).text
