"""mpirun, of Open MPI and of MPICH and Intel MPI (Hydra): found, asked whose it is, and told what to start."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hvdkit.common import programs
from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.jobs.launch.model import LauncherLine, LaunchFacts, Mpi, Setting
from hvdkit.jobs.launch.options import Request
from hvdkit.steps import secret

_SUPPORTED = ("Open MPI", "Intel MPI", "MPICH")
SESSIONS = "PRTE_MCA_prte_tmpdir_base"
"""Where Open MPI 5 makes a directory for each job."""

_TAKEN = re.compile(r":|--(map-?by|rank-?by|bind-?to|runtime-options|personality)(=.*)?", re.DOTALL)
"""Open MPI 5 spells these options anew, or refuses them as repeated, in the user's command, too.

Source: PRRTE, src/tools/prte/prte.c and src/mca/schizo/base/schizo_base_stubs.c.
"""
_UNTIED = "tied to one core, which is the default, Horovod's background thread would fight the training thread"
_LIVELY = Setting(
    "a host that no longer answers ends the job after a minute, not after eight",
    variables={
        f"PRTE_MCA_oob_tcp_keepalive_{name}": value
        for name, value in {"time": "20", "intvl": "10", "probes": "4"}.items()
    },
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
    found = shutil.which("mpirun", path=search_path) or shutil.which("mpiexec", path=search_path)
    return None if found is None else Path(found).absolute()


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
    return _open_mpi(request, facts, mpi) if mpi.implementation == "Open MPI" else _hydra(request, mpi)


def _open_mpi(request: Request, facts: LaunchFacts, mpi: Mpi) -> LauncherLine:
    """Versions 4 and 5. Local ranks inherit mpirun's whole environment, others only what it is told to pass on."""
    settings = [Setting("one process per rank", ("-n", str(request.n)))]
    place = ""  # for --map-by
    if request.hosts:
        settings.append(
            Setting("hosts, and the ranks that each may take", ("--host", ",".join(map(str, request.hosts))))
        )
        settings += [_LIVELY] if mpi.version >= (5,) else []
        slots = {host.slots for host in request.hosts}
        place = f"ppr:{slots.pop()}:node" if len(slots) == 1 else "slot"
    if request.depth is not None and request.cpu_bind is None:
        why = f"{request.binding}: each rank is tied to {request.depth} cores of its own"
        words = ("--map-by", f"{place or 'slot'}:PE={request.depth}", "--bind-to", "core")
        settings.append(Setting(why, words))
    else:
        tied = request.cpu_bind or "none"
        tied = "socket" if tied == "package" and mpi.version < (5,) else tied
        if place:
            settings.append(Setting("so many ranks on each host", ("--map-by", place)))
        elif request.bind != "none":
            settings.append(Setting("ranks are dealt out to them in turn", ("--map-by", tied)))
        elif request.n > facts.cores:
            why = f"{request.n} ranks on {facts.cores} cores, which Open MPI refuses otherwise"
            settings.append(Setting(why, ("--map-by", ":OVERSUBSCRIBE")))
        settings.append(Setting(request.binding if request.cpu_bind else _UNTIED, ("--bind-to", tied)))
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


def _hydra(request: Request, mpi: Mpi) -> LauncherLine:
    """It starts any number of ranks and passes on the whole environment."""
    intel = mpi.implementation == "Intel MPI"
    settings = [Setting("one process per rank", ("-n", str(request.n)))]
    if request.hosts:
        hosts = ",".join(map(str, request.hosts))
        words: tuple[str, ...] = ("-hosts", hosts)
        if intel:
            slots = {host.slots for host in request.hosts}
            if len(slots) > 1:
                raise InvalidArgumentError(
                    f"Intel MPI starts as many ranks on every host, got {hosts}; give all the same number of slots."
                )
            words = ("-hosts", ",".join(host.name for host in request.hosts), "-ppn", str(slots.pop()))
        settings.append(Setting("hosts, and the ranks that each may take", words))
    tied = "socket" if request.cpu_bind == "package" else request.cpu_bind
    if tied is not None and intel:  # it ties to a core whatever -bind-to says
        settings.append(Setting(request.binding, variables={"I_MPI_PIN_DOMAIN": tied}))
    elif tied is not None:
        settings.append(Setting(request.binding, ("-bind-to", tied)))
    elif request.depth is not None:
        why = f"{request.binding}: each rank is tied to {request.depth} cores of its own"
        settings.append(Setting(why, ("-bind-to", f"core:{request.depth}")))
    elif intel:
        settings.append(Setting(_UNTIED, variables={"I_MPI_PIN": "0"}))
    else:
        settings.append(Setting(_UNTIED, ("-bind-to", "none")))
    return LauncherLine(mpi.mpirun, tuple(settings), "PMI_RANK")
