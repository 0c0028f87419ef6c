"""jsrun, the launcher of IBM's LSF systems, such as Summit: a resource set of cores and GPUs for each rank."""

from __future__ import annotations

from pathlib import Path

from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch import remote
from hvdkit.run.launch.model import LauncherLine, Request, Setting


def line(request: Request, program: Path) -> LauncherLine:
    """The command line of jsrun up to the user's command.

    Raises:
        InvalidArgumentError: what jsrun cannot do.
    Source: OLCF, "Summit User Guide": ``jsrun -n 8 -a 1 -c 16 -g 1 ...``.
    """
    if request.hosts_chosen and request.hosts:
        raise InvalidArgumentError("jsrun takes the hosts of the LSF job; leave --hosts and --hostfile out.")
    if request.bind not in ("none", "core"):
        raise InvalidArgumentError(
            f"--bind {request.bind}: jsrun ties a rank to the cores of --depth; leave --bind out."
        )
    notes: tuple[str, ...] = ()
    settings = [Setting("one resource set for each rank", ("-n", str(request.n), "-a", "1"))]
    if request.depth is not None:
        settings.append(Setting("--depth: cores of each rank", ("-c", str(request.depth))))
    else:
        notes = ("jsrun gives each rank one core unless told; say how many with --depth.",)
    gpus = _gpus_of_a_rank(request)
    if gpus is not None:
        settings.append(Setting("GPUs of each rank", ("-g", str(gpus))))
    if request.ppn is not None:
        settings.append(Setting("--ppn: ranks on each host", ("-r", str(request.ppn))))
    if request.depth is not None:
        why = "each rank may use all its cores; otherwise jsrun ties it to the first of them"
        settings.append(Setting(why, ("-b", f"packed:{request.depth}")))
    return LauncherLine(program, tuple(settings), "", pass_on=remote.told("-E", values=False), notes=notes)


def _gpus_of_a_rank(request: Request) -> int | None:
    if request.gpus_per_task is not None or request.gpus_per_node is None:
        return request.gpus_per_task
    if request.ppn is None or request.gpus_per_node % request.ppn:
        got = "no --ppn" if request.ppn is None else f"--ppn {request.ppn}"
        raise InvalidArgumentError(
            f"jsrun gives each rank its own GPUs: --gpus-per-node {request.gpus_per_node} must be a multiple of --ppn, "
            f"got {got}; or use --gpus-per-task."
        )
    return request.gpus_per_node // request.ppn
