"""What ``--stage`` makes of a job: a short one before it, and another place for its Python."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch.command import Command
from hvdkit.run.launch.model import Host, LaunchPlan, Setting, Staged
from hvdkit.run.launch.options import Request
from hvdkit.run.launch.stage import copy

_MOVED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
_KEPT_BEHIND = "PATH"
"""Also with what was there before: a launcher finds its own programs by it where nothing is staged."""
_START = (
    'test -x "$0" && exec "$0" "$@"; echo "hvdkit launch: host $(uname -n) cannot run $0: the environment, or the base '
    'interpreter that it is made of, is not there." >&2; exit 1'
)


def wanted(directory: Path | None) -> Staged:
    """What is to be staged, and where.

    Args:
        directory: on the hosts' own disks, None for $TMPDIR, else /tmp.
    Raises:
        InvalidArgumentError: this Python is in no environment, or it cannot be read.
    """
    prefix = copy.active()
    store = (directory or Path(tempfile.gettempdir())).absolute() / f"hvdkit-stage-{os.geteuid()}"
    try:
        found = copy.entries(prefix)
        left = (*copy.editable(), *(entry.path for entry in found if entry.leaves and entry.path[:4] != "bin/"))
    except OSError as error:
        raise InvalidArgumentError(
            f"--stage cannot read the environment {prefix}: {error.strerror} ({error.filename}); repair it, or leave "
            "--stage out."
        ) from error
    return Staged(prefix, store, copy.key(found, str(prefix)), left)


def request(job: LaunchPlan, asked: Request, staged: Staged, *, mpi4py: bool) -> Request:
    """The short job that brings the environment to every host, by the launcher of the job that follows.

    Raises:
        InvalidArgumentError: that launcher does not use MPI, there is no mpi4py, or the hosts are not known.
    """
    if job.launcher_name == "horovodrun":
        raise InvalidArgumentError(
            "--stage sends the environment over MPI, and this job is started by 'horovodrun --gloo' without it; use "
            "--launcher mpirun, or leave --stage out."
        )
    if not mpi4py:
        raise InvalidArgumentError(
            "--stage sends the environment by mpi4py, which is not installed; pip install 'hvdkit[mpi]', or leave "
            "--stage out."
        )
    hosts = len(asked.hosts) or -(-asked.n // (asked.ppn or asked.n))
    if not asked.hosts and asked.ppn is None and job.direct:
        raise InvalidArgumentError(
            f"--stage under {job.launcher_name} needs --ppn here, to know how many hosts take part."
        )
    worker = ("-m", "mpi4py", "-m", "hvdkit.run.launch.stage.worker")
    words = (str(staged.prefix), str(staged.store), staged.key, str(hosts))
    return Request(
        hosts,
        ("/bin/sh", "-c", _START, sys.executable, "-P", *worker, *words),
        launcher=job.launcher_name,
        threads=1,
        ppn=1 if job.direct else None,
        hosts=tuple(Host(host.name, 1) for host in asked.hosts),
        hosts_chosen=asked.hosts_chosen,
        variables=asked.variables,
        dry_run=asked.dry_run,
    )


def moved_command(command: Command, staged: Staged) -> Command:
    """The command with the environment's program in its new place.

    Raises:
        InvalidArgumentError: it is a Python of another environment.
    """
    program = Path(command.words[0])
    if program.is_relative_to(staged.prefix):
        return replace(command, words=(*moved_words(command.words[:1], staged), *command.words[1:]))
    if command.script is not None:
        raise InvalidArgumentError(
            f"--stage copies the environment that hvdkit is in, {staged.prefix}, and the command is run by {program}; "
            "use that environment's python, or install hvdkit beside the other one."
        )
    return command


def moved_words(paths: tuple[str, ...], staged: Staged | None) -> tuple[str, ...]:
    """Paths and other words, those within the environment in their new place."""
    if staged is None:
        return paths
    inside = [Path(path).is_relative_to(staged.prefix) for path in paths]
    return tuple(str(staged.moved(Path(path))) if moves else path for path, moves in zip(paths, inside, strict=True))


def moved_variables(variables: Mapping[str, str], staged: Staged) -> Setting:
    """The ranks' variables that name the environment.

    Args:
        variables: as they would be otherwise.
    """
    found = {}
    for name in _MOVED:
        before = [part for part in variables.get(name, "").split(os.pathsep) if part]
        after = [str(staged.moved(Path(part))) if Path(part).is_relative_to(staged.prefix) else part for part in before]
        if name == _KEPT_BEHIND:
            first = str(staged.at / "bin")
            after = [first, *(part for part in after if part != first), *(part for part in before if part not in after)]
        if after != before:
            found[name] = os.pathsep.join(after)
    return Setting("--stage: the ranks' Python and packages lie on their host's own disk", variables=found)
