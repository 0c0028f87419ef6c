"""mpirun, of Open MPI and of MPICH and Intel MPI (Hydra): found, asked whose it is, and told what to start."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hvdkit.common import programs
from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.run.launch.model import LauncherLine, LaunchFacts, Mpi, Setting
from hvdkit.run.launch.options import Request
from hvdkit.steps import secret

_PROGRAMS = ("mpirun", "mpiexec")
_SUPPORTED = ("Open MPI", "Intel MPI", "MPICH")
SESSIONS = "PRTE_MCA_prte_tmpdir_base"
"""Where Open MPI 5 makes a directory for each job."""

_KEEPALIVE = {"time": "20", "intvl": "10", "probes": "4"}
"""Seconds without a word until a host is asked whether it lives, between two such questions, and how many."""

_TAKEN = re.compile(r":|--(map-?by|rank-?by|bind-?to|runtime-options|personality)(=.*)?", re.DOTALL)
"""Open MPI 5 spells these options anew, or refuses them as repeated, in the user's command, too.

Source: PRRTE, src/tools/prte/prte.c and src/mca/schizo/base/schizo_base_stubs.c.
"""

_UNTIED = Setting(
    "tied to one core, which is Open MPI's default, Horovod's background thread would fight the training thread",
    ("--bind-to", "none"),
)

_LIVELY = Setting(
    "a host that no longer answers ends the job after a minute, not after eight",
    variables={f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in _KEEPALIVE.items()},
)

_NAMES = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV"),
    *("GLIBC_TUNABLES", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "TF_CPP_MIN_LOG_LEVEL"),
)
_PREFIXES = ("HOROVOD_", "HVDKIT_", "OMP_", "NCCL_", "KERAS_")
"""Inherited variables that training reads, and what the names of others begin with."""
_NOT_MEANT_FOR_RANKS = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_MCA_")


def find_mpirun(search_path: str) -> Path | None:
    """Absolute path of the first mpirun (or else mpiexec) on a search path such as PATH, None without one."""
    for program in _PROGRAMS:
        found = shutil.which(program, path=search_path)
        if found is not None:
            return Path(found).absolute()
    return None


def identify(mpirun: Path, environment: Mapping[str, str]) -> Mpi:
    """Whose mpirun it is, by what it prints for ``--version``.

    Raises:
        LaunchError: neither Open MPI's nor Hydra, or it cannot be run.
    """
    answer = programs.version(mpirun, environment)
    implementation, version = programs.identify_mpi(answer.text)
    numbers = re.match(r"\d+(\.\d+)*", version)
    if not answer.ok:
        raise LaunchError(f"{mpirun} does not work here: {answer.problem}; mend that, or use --launcher horovodrun.")
    if implementation not in _SUPPORTED or numbers is None:
        raise LaunchError(
            f"{mpirun} is neither Open MPI's nor MPICH's or Intel MPI's (Hydra): its --version says "
            f"{answer.first_line!r}; put the directory of one of these first on PATH, or use --launcher horovodrun."
        )
    return Mpi(mpirun, implementation, tuple(map(int, numbers[0].split("."))))


def line(request: Request, facts: LaunchFacts, mpi: Mpi) -> LauncherLine:
    """The command line of mpirun up to the user's command.

    Raises:
        InvalidArgumentError: hosts with unequal slots under Intel MPI.
    """
    if mpi.implementation == "Open MPI":
        return _open_mpi(request, facts, mpi)
    # Hydra starts any number of ranks and passes on the whole environment
    settings = [Setting("one process per rank", ("-n", str(request.n))), *_hydra_hosts(request, mpi)]
    settings.append(_hydra_placement(request, facts, intel=mpi.implementation == "Intel MPI"))
    return LauncherLine(mpi.mpirun, tuple(settings), "PMI_RANK")


def _open_mpi(request: Request, facts: LaunchFacts, mpi: Mpi) -> LauncherLine:
    """Versions 4 and 5. Local ranks inherit mpirun's whole environment, others only what it is told to pass on."""
    if request.hosts:
        settings = _on_hosts(request, facts, mpi)
        if mpi.version >= (5,):
            settings.append(_LIVELY)
    else:
        settings = [Setting("one process per rank", ("-np", str(request.n))), *_placement(request, facts, mpi)]
    settings.append(
        Setting(
            "a rank that waits in MPI offers its core to others, to its own training thread first",
            ("--mca", "mpi_yield_when_idle", "1"),
        )
    )
    if facts.root:
        allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        settings.append(Setting("you are root, whom Open MPI refuses without both variables", variables=allow))
    pass_on = partial(_pass_on, request.variables) if request.hosts else None
    return LauncherLine(mpi.mpirun, tuple(settings), "OMPI_COMM_WORLD_RANK", pass_on=pass_on, taken=_TAKEN)


def _pass_on(given: Mapping[str, str], added: Mapping[str, str], environ: Mapping[str, str]) -> Setting:
    """What this job adds, what the user gives, what training reads of the inherited, and the secret of the meeting."""
    inherited = sorted(name for name in environ if name in _NAMES or name.startswith(_PREFIXES))
    wanted = [name for name in (*added, *given, *inherited) if not name.startswith(_NOT_MEANT_FOR_RANKS)]
    words = tuple(word for name in dict.fromkeys((*wanted, secret.VARIABLE)) for word in ("-x", name))
    return Setting("mpirun passes these on to other hosts, which have nothing of this environment otherwise", words)


def _on_hosts(request: Request, facts: LaunchFacts, mpi: Mpi) -> list[Setting]:
    hosts = ",".join(map(str, request.hosts))
    slots = {host.slots for host in request.hosts}
    where = f"ppr:{slots.pop()}:node" if len(slots) == 1 else "slot"
    settings = [
        Setting("one process per rank", ("-n", str(request.n))),
        Setting("hosts, and the ranks that each may take", ("--host", hosts)),
    ]
    if request.depth is not None or request.bind == "core":
        cores = request.depth or max(1, facts.cores // max(host.slots for host in request.hosts))
        why = f"each rank is tied to {cores} cores of its own"
        return [*settings, Setting(why, ("--map-by", f"{where}:PE={cores}", "--bind-to", "core"))]
    settings.append(Setting("so many ranks on each host", ("--map-by", where)))
    if request.bind in ("socket", "numa"):
        return [*settings, Setting(f"--bind {request.bind}", ("--bind-to", _place_name(request, mpi)))]
    return [*settings, _UNTIED]


def _place_name(request: Request, mpi: Mpi) -> str:
    return "package" if request.bind == "socket" and mpi.version >= (5,) else request.bind


def _placement(request: Request, facts: LaunchFacts, mpi: Mpi) -> list[Setting]:
    if request.depth is not None and request.bind in ("none", "core"):
        why = f"--depth {request.depth}: each rank is tied to so many cores"
        return [Setting(why, ("--map-by", f"slot:PE={request.depth}", "--bind-to", "core"))]
    if request.bind == "core":
        share = facts.cores // request.n
        why = f"--bind core: {facts.cores} cores for {request.n} ranks"
        return [Setting(why, ("--map-by", f"slot:PE={share}", "--bind-to", "core"))]
    if request.bind in ("socket", "numa"):
        where = _place_name(request, mpi)
        why = f"--bind {request.bind}: ranks are dealt out to them in turn and stay there"
        return [Setting(why, ("--map-by", where, "--bind-to", where))]
    settings = []
    if request.n > facts.cores:
        why = f"{request.n} ranks on {facts.cores} cores, which Open MPI refuses otherwise"
        settings.append(Setting(why, ("--map-by", ":OVERSUBSCRIBE")))
    return [*settings, _UNTIED]


def _hydra_hosts(request: Request, mpi: Mpi) -> list[Setting]:
    if not request.hosts:
        return []
    why = "hosts, and the ranks that each may take"
    if mpi.implementation != "Intel MPI":
        return [Setting(why, ("-hosts", ",".join(map(str, request.hosts))))]
    slots = {host.slots for host in request.hosts}
    if len(slots) > 1:
        raise InvalidArgumentError(
            f"Intel MPI starts as many ranks on every host, got {', '.join(map(str, request.hosts))}; give all hosts "
            "the same number of slots."
        )
    names = ",".join(host.name for host in request.hosts)
    return [Setting(why, ("-hosts", names, "-ppn", str(slots.pop())))]


def _hydra_placement(request: Request, facts: LaunchFacts, *, intel: bool) -> Setting:
    if request.depth is not None and request.bind in ("none", "core"):
        why = f"--depth {request.depth}: each rank is tied to so many cores"
        return Setting(why, ("-bind-to", f"core:{request.depth}"))
    if request.bind == "core":
        share = max(1, facts.cores // max((host.slots for host in request.hosts), default=request.n))
        return Setting(f"--bind core: {facts.cores} cores for {request.n} ranks", ("-bind-to", f"core:{share}"))
    if request.bind != "none":
        why = f"--bind {request.bind}: ranks are dealt out to them in turn and stay there"
        if intel:  # which ties to a core whatever -bind-to says
            return Setting(why, variables={"I_MPI_PIN_DOMAIN": request.bind})
        return Setting(why, ("-bind-to", request.bind))
    why = "tied to one core, Horovod's background thread would fight the training thread"
    return Setting(why, variables={"I_MPI_PIN": "0"}) if intel else Setting(why, ("-bind-to", "none"))
