"""aprun, the launcher of Cray XC systems (ALPS), such as Theta."""

from __future__ import annotations

import re
from pathlib import Path

from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch import pals, remote
from hvdkit.run.launch.model import LauncherLine, Request, Setting

_BINDINGS = {"core": "cpu", "numa": "numa_node"}
_NODE = re.compile(r"(?:nid)?0*([0-9]+)")


def line(request: Request, program: Path) -> LauncherLine:
    """The command line of aprun up to the user's command.

    Raises:
        InvalidArgumentError: what aprun cannot do.
    Source: aprun(1); ALCF's tutorials: ``aprun -n 8 -N 4 --cc depth -d 16 python ...``.
    """
    settings = [Setting("one process per rank", ("-n", str(request.n)))]
    if request.ppn is not None:
        settings.append(Setting("--ppn: ranks on each host", ("-N", str(request.ppn))))
    if request.bind == "socket":
        raise InvalidArgumentError("--bind socket: aprun ties ranks to cores or NUMA domains; use core or numa.")
    settings.append(pals.binding(request, "--cc", _BINDINGS))
    if request.depth is not None:
        settings.append(Setting("--depth: cores of each rank", ("-d", str(request.depth))))
    if request.hosts_chosen and request.hosts:
        nodes = ",".join(_node_id(host.name) for host in request.hosts)
        settings.append(Setting("the hosts that you named, by their node ids", ("-L", nodes)))
    return LauncherLine(program, tuple(settings), "", pass_on=remote.told("-e", values=True))


def _node_id(host: str) -> str:
    match = _NODE.fullmatch(host)
    if match is None:
        raise InvalidArgumentError(f"host {host!r}: aprun takes node ids, such as 12 or nid00012.")
    return match[1]
