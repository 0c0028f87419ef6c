"""srun, the launcher of Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdkit.run.launch.model import LauncherLine, Request, Setting
from hvdkit.steps.launchers import inside_srun

_BINDINGS = {"core": "cores", "socket": "sockets", "numa": "ldoms"}


def line(request: Request, program: Path) -> LauncherLine:
    """The command line of srun up to the user's command.

    Source: srun(1).
    """
    settings = [Setting("one process per rank", (f"--ntasks={request.n}",))]
    nodes = None
    if request.ppn is not None:
        # A rank reads from SLURM_NTASKS_PER_NODE how many share its host, so that it must not be a mere maximum.
        ppn = min(request.ppn, request.n)
        nodes = -(-request.n // ppn)
        words = (f"--ntasks-per-node={ppn}", f"--nodes={nodes}")
        settings.append(Setting("--ppn: ranks on each host, and so many hosts", words))
    if request.depth is not None:
        why = "--depth: cores of each rank; since Slurm 22.05 srun no longer takes it from sbatch"
        settings.append(Setting(why, (f"--cpus-per-task={request.depth}",)))
    if request.gpus_per_node is not None:
        settings.append(Setting("--gpus-per-node", (f"--gpus-per-node={request.gpus_per_node}",)))
    if request.gpus_per_task is not None:
        settings.append(Setting("--gpus-per-task", (f"--gpus-per-task={request.gpus_per_task}",)))
    settings += _binding(request)
    if request.hosts_chosen and request.hosts:
        names = ",".join(host.name for host in request.hosts[:nodes])
        settings.append(Setting("the hosts that you named", (f"--nodelist={names}",)))
    settings.append(
        Setting("a rank that fails ends the job; otherwise the others wait for it", ("--kill-on-bad-exit=1",))
    )
    settings.append(Setting("one Ctrl-C ends the job; otherwise srun asks for two", ("--quit-on-interrupt",)))
    return LauncherLine(program, tuple(settings), "", pass_on=_pass_on)


def inside_a_step(environ: Mapping[str, str]) -> list[Setting]:
    """What srun needs inside another srun, such as ``srun --pty bash``; else it waits for the cores that this one has.

    Source: srun(1), SLURM_OVERLAP.
    """
    if not inside_srun(environ):
        return []
    return [Setting("this shell is an srun step itself, whose cores the ranks share", variables={"SLURM_OVERLAP": "1"})]


def _binding(request: Request) -> list[Setting]:
    if request.cpu_bind is not None:
        return [Setting("--cpu-bind: the cores of each rank on a host", (f"--cpu-bind={request.cpu_bind}",))]
    if request.bind != "none":
        return [Setting(f"--bind {request.bind}", (f"--cpu-bind={_BINDINGS[request.bind]}",))]
    if request.depth is not None:
        return []  # Slurm ties a rank to its cpus-per-task, where the site has it tie at all
    why = "tied to one core, Horovod's background thread would fight the training thread; give --depth to tie"
    return [Setting(why, ("--cpu-bind=none",))]


def _pass_on(_added: Mapping[str, str], _environ: Mapping[str, str]) -> Setting:
    return Setting("ranks on every host get the variables of this process", ("--export=ALL",))
