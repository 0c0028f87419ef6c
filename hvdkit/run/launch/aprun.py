"""aprun, the launcher of Cray XC systems (ALPS), such as Theta."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import InvalidArgumentError
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
    settings.append(_binding(request))
    if request.depth is not None:
        settings.append(Setting("--depth: cores of each rank", ("-d", str(request.depth))))
    if request.hosts_chosen and request.hosts:
        nodes = ",".join(_node_id(host.name) for host in request.hosts)
        settings.append(Setting("the hosts that you named, by their node ids", ("-L", nodes)))
    return LauncherLine(program, tuple(settings), "", pass_on=_pass_on)


def _binding(request: Request) -> Setting:
    if request.bind == "none" and request.depth is not None:
        return Setting("each rank is tied to the cores of its --depth, all of them", ("--cc", "depth"))
    if request.bind == "none":
        why = "tied to one core, Horovod's background thread would fight the training thread; give --depth to tie"
        return Setting(why, ("--cc", "none"))
    if request.bind not in _BINDINGS:
        raise InvalidArgumentError("--bind socket: aprun ties ranks to cores or NUMA domains; use core or numa.")
    return Setting(f"--bind {request.bind}", ("--cc", _BINDINGS[request.bind]))


def _node_id(host: str) -> str:
    match = _NODE.fullmatch(host)
    if match is None:
        raise InvalidArgumentError(f"host {host!r}: aprun takes node ids, such as 12 or nid00012.")
    return match[1]


def _pass_on(added: Mapping[str, str], _environ: Mapping[str, str]) -> Setting:
    words = tuple(word for name, value in added.items() for word in ("-e", f"{name}={value}"))
    return Setting("variables for the ranks on every host", words)
