"""PALS's mpiexec, the launcher of HPE Cray systems under PBS, such as Polaris."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdkit.run.launch import remote
from hvdkit.run.launch.model import BINDINGS, LauncherLine, Request, Setting


def line(request: Request, program: Path) -> LauncherLine:
    """The command line of mpiexec up to the user's command.

    Source: ALCF, "Running Jobs on Polaris": ``mpiexec -n 8 --ppn 4 --depth=16 --cpu-bind depth ...``.
    """
    settings = [Setting("one process per rank", ("-n", str(request.n)))]
    if request.ppn is not None:
        settings.append(Setting("--ppn: ranks on each host", ("--ppn", str(request.ppn))))
    if request.depth is not None and request.cpu_bind is None:
        settings.append(Setting("--depth: cores of each rank", (f"--depth={request.depth}",)))
    settings.append(binding(request, "--cpu-bind", {name: name for name in BINDINGS}))
    if request.hosts_chosen and request.hosts:
        names = ",".join(host.name for host in request.hosts)
        settings.append(Setting("the hosts that you named", ("--hosts", names)))
    return LauncherLine(program, tuple(settings), "", pass_on=remote.told("--env", values=True))


def binding(request: Request, option: str, names: Mapping[str, str]) -> Setting:
    """What each rank is tied to, said with an option of PALS or of ALPS, its predecessor, in its own names."""
    if request.cpu_bind is not None:
        return Setting("--cpu-bind: the cores of each rank on a host", (option, request.cpu_bind))
    if request.bind == "none" and request.depth is not None:
        return Setting("each rank is tied to the cores of its --depth, all of them", (option, "depth"))
    if request.bind == "none":
        why = "tied to one core, Horovod's background thread would fight the training thread; give --depth to tie"
        return Setting(why, (option, "none"))
    return Setting(f"--bind {request.bind}", (option, names[request.bind]))
