"""What each launcher is told, up to the user's command: one function a launcher, in the launcher's own words.

Each makes a ``LauncherLine``, and raises InvalidArgumentError for what its launcher cannot do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch.model import LauncherLine, LaunchFacts, Mpi, Setting
from hvdkit.jobs.launch.options import Request
from hvdkit.steps import secret

SESSIONS = "PRTE_MCA_prte_tmpdir_base"
"""Where Open MPI 5 makes a directory for each job."""
COOLDOWN_S = (2, 10)
"""Seconds, at least and at most, that horovodrun leaves a host out after one of its workers failed."""
_UNTIED = "tied to one core, which is the default, Horovod's background thread would fight the training thread"
_UNTIED_BATCH = "tied to one core, Horovod's background thread would fight the training thread; give --depth to tie"
_PPN, _DEPTH = "--ppn: ranks on each host", "--depth: cores of each rank"
_TAKEN = re.compile(r":|--(map-?by|rank-?by|bind-?to|runtime-options|personality)(=.*)?", re.DOTALL)
"""Open MPI 5 spells these options anew, or refuses them as repeated, in the user's command, too.

Source: PRRTE, src/tools/prte/prte.c and src/mca/schizo/base/schizo_base_stubs.c.
"""
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
_NODE = re.compile(r"(?:nid)?0*([0-9]+)")


def open_mpi(request: Request, facts: LaunchFacts, mpi: Mpi) -> LauncherLine:
    """Versions 4 and 5. Local ranks inherit mpirun's whole environment, others only what it is told to pass on."""
    settings = [_each("-n", str(request.n))]
    place = ""  # for --map-by
    if request.hosts:
        settings.append(_slots(request, "--host"))
        settings += [_LIVELY] if mpi.version >= (5,) else []
        slots = {host.slots for host in request.hosts}
        place = f"ppr:{slots.pop()}:node" if len(slots) == 1 else "slot"
    if request.depth is not None and request.cpu_bind is None:
        settings.append(_own_cores(request, "--map-by", f"{place or 'slot'}:PE={request.depth}", "--bind-to", "core"))
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

    def pass_on(added: Mapping[str, str], environ: Mapping[str, str]) -> Setting:
        """What this job adds, what the user gives, what training reads of the inherited, and the meeting's secret."""
        inherited = sorted(name for name in environ if name in _NAMES or name.startswith(_PREFIXES))
        wanted = (*added, *request.variables, *inherited)
        names = [name for name in wanted if not name.startswith(_NOT_MEANT_FOR_RANKS)]
        words = tuple(word for name in dict.fromkeys((*names, secret.VARIABLE)) for word in ("-x", name))
        return Setting("mpirun passes these on to other hosts, which have nothing of this environment otherwise", words)

    told = pass_on if request.hosts else None
    return LauncherLine(mpi.mpirun, tuple(settings), "OMPI_COMM_WORLD_RANK", told, taken=_TAKEN)


def hydra(request: Request, mpi: Mpi) -> LauncherLine:
    """mpirun of MPICH and Intel MPI. It starts any number of ranks and passes on the whole environment."""
    intel = mpi.implementation == "Intel MPI"
    settings = [_each("-n", str(request.n))]
    slots = {host.slots for host in request.hosts}
    if intel and len(slots) > 1:
        raise InvalidArgumentError(
            f"Intel MPI starts as many ranks on every host, got {','.join(map(str, request.hosts))}; give all the same "
            "number of slots."
        )
    if intel and slots:
        words = ("-hosts", ",".join(host.name for host in request.hosts), "-ppn", str(slots.pop()))
        settings.append(Setting("hosts, and the ranks that each may take", words))
    elif slots:
        settings.append(_slots(request, "-hosts"))
    tied = "socket" if request.cpu_bind == "package" else request.cpu_bind
    if tied is not None and intel:  # it ties to a core whatever -bind-to says
        settings.append(Setting(request.binding, variables={"I_MPI_PIN_DOMAIN": tied}))
    elif tied is not None:
        settings.append(Setting(request.binding, ("-bind-to", tied)))
    elif request.depth is not None:
        settings.append(_own_cores(request, "-bind-to", f"core:{request.depth}"))
    elif intel:
        settings.append(Setting(_UNTIED, variables={"I_MPI_PIN": "0"}))
    else:
        settings.append(Setting(_UNTIED, ("-bind-to", "none")))
    return LauncherLine(mpi.mpirun, tuple(settings), "PMI_RANK")


def horovodrun(request: Request, program: Path) -> LauncherLine:
    """horovodrun over Gloo. Its MPI mode is never used: it fails with Open MPI 5."""
    settings = [Setting("Horovod's own transport, no MPI", ("--gloo",)), _each("-np", str(request.n))]
    if request.elastic:
        script = str(request.host_discovery_script)
        settings += [
            Setting("ranks below which the job waits", ("--min-np", str(request.min_np))),
            Setting("ranks that it never exceeds", ("--max-np", str(request.max_np))),
            Setting("asked again and again for the hosts", ("--host-discovery-script", script)),
            Setting(
                "a host with a failed worker is left out for a while, not forever",
                ("--blacklist-cooldown-range", *map(str, COOLDOWN_S)),
            ),
        ]
    elif request.hosts:
        settings.append(_slots(request, "-H"))
    if not request.hosts:
        local = "all ranks are on this machine, so none has to be looked for, nor another host waited for"
        settings.append(Setting(local, ("--network-interface", "lo")))
    settings.append(
        Setting("horovodrun takes options of the command for its own, but nothing behind '--'", ("env", "--"))
    )
    needs_ssh = (
        "horovodrun reaches other hosts by ssh: 'ssh HOST true' must work from here without a password, and this "
        "directory and Python must lie at the same path there."
    )
    return LauncherLine(program, tuple(settings), "HOROVOD_RANK", notes=(needs_ssh,) if request.hosts else ())


def _pals(request: Request, program: Path) -> LauncherLine:
    """PALS's mpiexec, of HPE Cray systems under PBS, such as Polaris.

    Source: ALCF, "Running Jobs on Polaris": ``mpiexec -n 8 --ppn 4 --depth=16 --cpu-bind depth ...``.
    """
    settings = [
        _each("-n", str(request.n)),
        *_given(request.ppn, _PPN, "--ppn", "{}"),
        *_given(request.depth if request.bind != "none" or request.cpu_bind is None else None, _DEPTH, "--depth={}"),
        _cpu_bind(request, "--cpu-bind"),
        *_given(",".join(_chosen(request)) or None, "the hosts that you named", "--hosts", "{}"),
    ]
    return LauncherLine(program, tuple(settings), "", _told("--env", values=True))


def _aprun(request: Request, program: Path) -> LauncherLine:
    """aprun, of Cray XC systems (ALPS), such as Theta.

    Source: aprun(1); ALCF's tutorials: ``aprun -n 8 -N 4 --cc depth -d 16 python ...``.
    """
    nodes = []
    for host in _chosen(request):
        match = _NODE.fullmatch(host)
        if match is None:
            raise InvalidArgumentError(f"host {host!r}: aprun takes node ids, such as 12 or nid00012.")
        nodes.append(match[1])
    settings = [
        _each("-n", str(request.n)),
        *_given(request.ppn, _PPN, "-N", "{}"),
        _cpu_bind(request, "--cc"),
        *_given(request.depth, _DEPTH, "-d", "{}"),
        *_given(",".join(nodes) or None, "the hosts that you named, by their node ids", "-L", "{}"),
    ]
    return LauncherLine(program, tuple(settings), "", _told("-e", values=True))


def _srun(request: Request, program: Path) -> LauncherLine:
    """srun, of Slurm.

    Source: srun(1).
    """
    settings = [_each(f"--ntasks={request.n}")]
    nodes = None
    if request.ppn is not None:
        # A rank reads from SLURM_NTASKS_PER_NODE how many share its host, so that it must not be a mere maximum.
        ppn = min(request.ppn, request.n)
        nodes = -(-request.n // ppn)
        words = (f"--ntasks-per-node={ppn}", f"--nodes={nodes}")
        settings.append(Setting("--ppn: ranks on each host, and so many hosts", words))
    if request.cpu_bind is not None:
        why, tied = f"{request.binding}: the cores of each rank on a host", request.cpu_bind
    elif request.depth is not None:
        why = "each rank is tied to the cores of its --depth; by itself Slurm ties only ranks that fill their host"
        tied = "cores"
    else:
        why, tied = _UNTIED_BATCH, "none"
    since = "since Slurm 22.05 srun no longer takes it from sbatch"
    settings += [
        *_given(request.depth, f"{_DEPTH}; {since}", "--cpus-per-task={}"),
        *_given(request.gpus_per_node, "--gpus-per-node", "--gpus-per-node={}"),
        Setting(why, (f"--cpu-bind={tied}",)),
        *_given(",".join(_chosen(request)[:nodes]) or None, "the hosts that you named", "--nodelist={}"),
        Setting("a rank that fails ends the job; otherwise the others wait for it", ("--kill-on-bad-exit=1",)),
        Setting("one Ctrl-C ends the job; otherwise srun asks for two", ("--quit-on-interrupt",)),
    ]
    exported = Setting("ranks on every host get the variables of this process", ("--export=ALL",))
    return LauncherLine(program, tuple(settings), "SLURM_PROCID", lambda _added, _environ: exported)


def _jsrun(request: Request, program: Path) -> LauncherLine:
    """jsrun, of IBM's LSF systems, such as Summit: a resource set of cores and GPUs for each rank.

    Source: OLCF, "Summit User Guide": ``jsrun -n 8 -a 1 -c 16 -g 1 ...``.
    """
    if _chosen(request):
        raise InvalidArgumentError("jsrun takes the hosts of the LSF job; leave --hosts and --hostfile out.")
    gpus, ppn = request.gpus_per_node, request.ppn
    if gpus is not None and (ppn is None or gpus % ppn):
        got = "no --ppn" if ppn is None else f"--ppn {ppn}"
        raise InvalidArgumentError(
            f"jsrun gives each rank its own GPUs: --gpus-per-node {gpus} must be a multiple of --ppn, got {got}."
        )
    each = None if gpus is None or ppn is None else gpus // ppn
    settings = [
        Setting("one resource set for each rank", ("-n", str(request.n), "-a", "1")),
        *_given(request.depth, _DEPTH, "-c", "{}"),
        *_given(each, "--gpus-per-node: GPUs of each rank", "-g", "{}"),
        *_given(ppn, _PPN, "-r", "{}"),
    ]
    if request.depth is not None:
        why = "each rank may use all its cores; otherwise jsrun ties it to the first of them"
        settings.append(Setting(why, ("-b", f"packed:{request.depth}")))
    notes = () if request.depth else ("jsrun gives each rank one core unless told; say how many with --depth.",)
    return LauncherLine(program, tuple(settings), "", _told("-E", values=False), notes=notes)


BATCH = {"mpiexec": _pals, "aprun": _aprun, "srun": _srun, "jsrun": _jsrun}
"""Launchers that belong to a batch system, each with what makes its command line; mpiexec is that of PALS alone."""
CAN_CPU_BIND = ("mpirun", "srun", "mpiexec", "aprun")
"""Launchers that have words for ``--cpu-bind``."""
CAN_GIVE_GPUS = ("srun", "jsrun")
"""The same for ``--gpus-per-node``."""


# What several of them are told


def _each(*words: str) -> Setting:
    return Setting("one process per rank", words)


def _slots(request: Request, option: str) -> Setting:
    return Setting("hosts, and the ranks that each may take", (option, ",".join(map(str, request.hosts))))


def _own_cores(request: Request, *words: str) -> Setting:
    return Setting(f"{request.binding}: each rank is tied to {request.depth} cores of its own", words)


def _cpu_bind(request: Request, option: str) -> Setting:
    """What each rank is tied to, said to PALS or to ALPS, its predecessor."""
    if request.cpu_bind is not None:
        return Setting(f"{request.binding}: the cores of each rank on a host", (option, request.cpu_bind))
    if request.depth is not None:
        return Setting("each rank is tied to the cores of its --depth, all of them", (option, "depth"))
    return Setting(_UNTIED_BATCH, (option, "none"))


def _given(value: object, why: str, *words: str) -> list[Setting]:
    """What a launcher is told, ``{}`` in its words standing for the value, where there is one."""
    return [] if value is None else [Setting(why, tuple(word.format(value) for word in words))]


def _chosen(request: Request) -> list[str]:
    """Names of the hosts that the user named."""
    return [host.name for host in request.hosts] if request.hosts_chosen else []


def _told(option: str, *, values: bool) -> Callable[[Mapping[str, str], Mapping[str, str]], Setting]:
    """A ``LauncherLine.pass_on``: an option for each variable, with its value or only its name."""

    def pass_on(added: Mapping[str, str], _environ: Mapping[str, str]) -> Setting:
        words: list[str] = []
        for name, value in added.items():
            words += [option, f"{name}={value}" if values else name]
        return Setting("variables for the ranks on every host", tuple(words))

    return pass_on
