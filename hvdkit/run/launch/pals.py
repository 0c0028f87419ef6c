"""PALS's mpiexec, the launcher of HPE Cray systems under PBS, such as Polaris."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdkit.run.launch.model import LauncherLine, Request, Setting

_BINDINGS = {"none": "none", "core": "core", "socket": "socket", "numa": "numa"}


def line(request: Request, program: Path) -> LauncherLine:
    """The command line of mpiexec up to the user's command.

    Source: ALCF, "Running Jobs on Polaris": ``mpiexec -n 8 --ppn 4 --depth=16 --cpu-bind depth ...``.
    """
    settings = [Setting("one process per rank", ("-n", str(request.n)))]
    if request.ppn is not None:
        settings.append(Setting("--ppn: ranks on each host", ("--ppn", str(request.ppn))))
    if request.depth is not None:
        settings.append(Setting("--depth: cores of each rank", (f"--depth={request.depth}",)))
    settings.append(_binding(request))
    if request.hosts_chosen and request.hosts:
        names = ",".join(host.name for host in request.hosts)
        settings.append(Setting("the hosts that you named", ("--hosts", names)))
    return LauncherLine(program, tuple(settings), "", pass_on=_pass_on)


def _binding(request: Request) -> Setting:
    if request.bind == "none" and request.depth is not None:
        return Setting("each rank is tied to the cores of its --depth, all of them", ("--cpu-bind", "depth"))
    if request.bind == "none":
        why = "tied to one core, Horovod's background thread would fight the training thread; give --depth to tie"
        return Setting(why, ("--cpu-bind", "none"))
    return Setting(f"--bind {request.bind}", ("--cpu-bind", _BINDINGS[request.bind]))


def _pass_on(added: Mapping[str, str], _environ: Mapping[str, str]) -> Setting:
    words = tuple(word for name, value in added.items() for word in ("--env", f"{name}={value}"))
    return Setting("variables for the ranks on every host", words)
