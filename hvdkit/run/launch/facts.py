"""Collects what there is to launch with; asks no more of the machine than the request needs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdkit.run.launch import batch, plan
from hvdkit.run.launch.command import resolve
from hvdkit.run.launch.machine import free_port, installed_horovod, recorded_horovod, usable_cores
from hvdkit.run.launch.model import LaunchFacts, LaunchPlan
from hvdkit.run.launch.mpirun import find_mpirun, identify
from hvdkit.run.launch.options import Request
from hvdkit.run.launch.recordings import recorder
from hvdkit.steps import hosts as job_hosts
from hvdkit.steps import launchers


def own_python() -> Path:
    """Absolute path of the interpreter that runs hvdkit.

    Links are not followed: a virtual environment's interpreter is a link to one that knows nothing of it.
    """
    return Path(sys.executable).absolute()


def has_mpi4py() -> bool:
    """Whether mpi4py is installed beside hvdkit."""
    return importlib.util.find_spec("mpi4py") is not None


def job_path(environ: Mapping[str, str], python: Path) -> str:
    """PATH for the job: the directory of the interpreter comes first if ``python`` were another one otherwise."""
    path = environ.get("PATH", os.defpath)
    found = shutil.which("python", path=path) or shutil.which("python3", path=path)
    if found is not None and Path(found).absolute().parent == python.parent:
        return path
    own = str(python.parent)
    return os.pathsep.join([own, *(directory for directory in path.split(os.pathsep) if directory not in ("", own))])


def gather(request: Request, environ: Mapping[str, str]) -> LaunchFacts:
    """The facts that ``plan.build`` needs for this request.

    Raises:
        LaunchError: Horovod or mpirun is there and does not work.
        InstallError: Horovod's build record cannot be read.
    """
    python = own_python()
    path = job_path(environ, python)
    programs = batch.installed(_wanted(request, environ), path, environ)
    chosen = batch.choice(environ, programs) if request.launcher == "auto" else None
    open_choice = request.launcher == "auto" and chosen is None
    horovod = installed_horovod(python) if open_choice else recorded_horovod()
    wants_mpi = request.launcher == "mpirun" or (open_choice and (horovod is None or horovod.mpi))
    own = None if horovod is None else horovod.mpi_bin  # where that is not known, the first mpirun on PATH is taken
    mpirun = find_mpirun(path if own is None else str(own)) if wants_mpi else None
    if mpirun is not None and str(mpirun.parent) not in path.split(os.pathsep):
        path = os.pathsep.join([path, str(mpirun.parent)])  # Intel's mpirun looks for its parts there
    horovodrun = shutil.which("horovodrun", path=path)
    records = request.mpi_profile is not None and request.launcher != "horovodrun"
    without_mpi = request.launcher == "auto" and horovod is not None and not horovod.mpi
    mpi_bin = own if mpirun is None else mpirun.parent
    return LaunchFacts(
        cores=usable_cores(),
        root=os.geteuid() == 0,
        python=python,
        path=path,
        horovod=horovod,
        mpi=None if mpirun is None else identify(mpirun, {**environ, "PATH": path}),
        horovodrun=None if horovodrun is None else Path(horovodrun).absolute(),
        mpi4py=has_mpi4py(),
        programs=programs,
        batch=chosen,
        mpi_recorder=recorder(mpi_bin, environ, dry=request.dry_run) if records and not without_mpi else None,
        master_port=None if request.elastic else free_port(),
    )


def planned(request: Request, environ: Mapping[str, str]) -> tuple[LaunchFacts, LaunchPlan]:
    """What there is for a request, and the plan of its job.

    Raises:
        InvalidArgumentError, LaunchError, InstallError: see ``gather``, ``command.resolve`` and ``plan.build``.
    """
    python = own_python()
    environ = launchers.without_place(environ)  # an outer job's rank would win over that of the launcher
    command = resolve(request.command, request.variables.get("PATH", job_path(environ, python)), python)
    found = gather(request, environ)
    return found, plan.build(request, found, command, environ)


def _wanted(request: Request, environ: Mapping[str, str]) -> list[str]:
    """The launchers of batch systems to look for; none where the job is on this machine alone, which needs none."""
    if request.launcher != "auto":
        return [request.launcher] if request.launcher in batch.LINES else []
    only_here = not request.hosts and (request.hosts_chosen or bool(job_hosts.of_job(environ)))
    return [] if only_here else batch.called_for(environ)
