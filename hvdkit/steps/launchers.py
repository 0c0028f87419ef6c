"""Step 1: which launcher started this process, and which hosts its job has, read from its environment variables.

A launcher is a row in ``LAUNCHERS``. Rank and size always come from one row. The order is the order of nesting,
innermost first: what a program starts inside a batch job sets variables beside those of the job, so that
``horovodrun`` and ``torchrun`` stand before MPI, and MPI before Slurm (Open MPI starts its daemons with ``srun``,
whose variables the ranks inherit). jsrun, PALS and Flux set the variables of an MPI library beside their own, with the
same values, and stand before it. A row counts as found when all variables of ``markers`` are set.

A shell's export or an outer job can leave the variables of a launcher that did not start this process. The processes
above this one have had those, too: of several rows, the one whose rank the fewest of them have is the innermost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import LauncherError


@dataclass(frozen=True, slots=True)
class Launcher:
    """Names of the environment variables that a launcher sets for each process.

    Of several names the first that is set is read; () where it sets none, so that MPI or Horovod must say it.
    """

    name: str  # as users say it
    markers: tuple[str, ...]  # variables that prove that this launcher started the process
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    proves: Callable[[Mapping[str, str]], bool] | None = None  # a further condition on the environment
    local_size_of: Callable[[Mapping[str, str]], int | None] | None = None  # where it says more than ``local_size``


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher's environment says of this process; None where it says nothing."""

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Horovod Elastic started this process: ranks may come and go, and have other numbers then."""
    return environ.get("HOROVOD_ELASTIC") == "1"


_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0


def inside_srun(environ: Mapping[str, str]) -> bool:
    """Whether this process is in an ``srun`` step.

    The body of an ``sbatch`` script has SLURM_PROCID=0 and SLURM_NTASKS=N too and is no rank; only steps have a
    step id below the numbers reserved for the batch, extern and interactive steps, which hold no cores (slurm/slurm.h).
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _FIRST_SPECIAL_SLURM_STEP


_TASKS_OF_HOSTS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def _tasks_on_this_node(environ: Mapping[str, str]) -> int | None:
    """How many tasks of the srun step share this host; None where Slurm does not say.

    SLURM_NTASKS_PER_NODE is what the job asked for: a step of fewer tasks, or on more hosts, inherits it from the
    ``sbatch`` script all the same.

    Source: srun(1), SLURM_STEP_TASKS_PER_NODE ("4(x2),1": two hosts of 4, one of 1) and SLURM_NODEID.
    """
    node = environ.get("SLURM_NODEID", "")
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = _TASKS_OF_HOSTS.fullmatch(part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _prefixed(name: str, prefix: str) -> Launcher:
    """One that sets PREFIX_RANK, PREFIX_SIZE, PREFIX_LOCAL_RANK and PREFIX_LOCAL_SIZE, and is known by the first."""
    rank, size, local_rank, local_size = ((f"{prefix}_{one}",) for one in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return Launcher(name, rank, rank, size, local_rank, local_size)


_TORCHRUN = (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_PALS = (("PALS_RANKID", "PMI_RANK"), ("PMI_SIZE",), ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",))
_PMI = (("PMI_RANK",), ("PMI_SIZE",))

LAUNCHERS: tuple[Launcher, ...] = (
    _prefixed("horovodrun", "HOROVOD"),
    Launcher("torchrun", ("TORCHELASTIC_RUN_ID",), *_TORCHRUN),
    _prefixed("jsrun", "JSM_NAMESPACE"),
    _prefixed("Open MPI", "OMPI_COMM_WORLD"),
    _prefixed("MVAPICH2", "MV2_COMM_WORLD"),
    Launcher("PALS", ("PALS_LOCAL_RANKID",), *_PALS),  # its versions differ
    Launcher("PALS", ("PALS_RANKID",), *_PALS),
    Launcher("PALS", ("PALS_APID", "PMI_RANK"), *_PALS),
    Launcher("Flux", ("FLUX_TASK_RANK",), ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",)),
    # and Intel MPI, which has the same Hydra
    Launcher("MPICH", ("PMI_RANK", "MPI_LOCALRANKID"), *_PMI, ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    Launcher("aprun", ("ALPS_APP_PE",), ("ALPS_APP_PE",), ()),
    Launcher(
        "srun",
        ("SLURM_PROCID",),
        rank=("SLURM_PROCID",),
        # SLURM_NTASKS is what the job asked for; a step of fewer tasks (srun -n 2) has its own count.
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_NTASKS_PER_NODE",),
        proves=inside_srun,
        local_size_of=_tasks_on_this_node,
    ),
    # other PMI launchers, and a Hydra that says nothing of the host
    Launcher("MPICH", ("PMI_RANK", "PMI_SIZE"), *_PMI),
    # launchers that speak torchrun's language without being torchrun
    Launcher("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), *_TORCHRUN),
)


_SIZE_IS_THEIRS = ("horovodrun", "jsrun", "Open MPI", "MVAPICH2")
"""Launchers whose size no batch job and no user sets: where it is left alone, the rank was lost on the way."""

BATCH_JOBS = {
    "Slurm": "SLURM_JOB_ID",
    "PBS": "PBS_JOBID",
    "LSF": "LSB_JOBID",
    "Cobalt": "COBALT_JOBID",
    "Flux": "FLUX_JOB_ID",
}
"""Which variable holds the number of the batch job, by batch system."""

_RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS_PORT",)
_PLACES = re.compile(
    r"HOROVOD_(HOSTNAME|((LOCAL_|CROSS_)?(RANK|SIZE))|CONTROLLER|GLOO_RENDEZVOUS_\w+|ELASTIC)|HVDKIT_RANK_PROCESS"
    r"|((LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE))|TORCHELASTIC_\w+|MASTER_(ADDR|PORT)|TF_CONFIG"
    r"|OMPI_((COMM_)?WORLD|UNIVERSE|FILE|FIRST|NUM_APP|APP|ARGV|COMMAND)\w*"
    r"|OMPI_MCA_(num_procs|initial_wdir|pmix|ess\w*|orte_(ess_\w+|hnp_uri|local_daemon_uri|\w+_session_dir|app_num|launch))"
    r"|PMIX_(?!MCA_)\w+|PRTE_LAUNCHED|MPI_LOCAL\w+|HYDI_\w+|MV2_COMM_WORLD_\w+|JSM_NAMESPACE\w*|ALPS_APP_\w+"
    r"|PMI2?_(RANK|SIZE|FD|PORT|ID|JOBID|SPAWNED|APPNUM|HOSTNAME|UNIVERSE_SIZE|PROCESS_MAPPING|(LOCAL|CONTROL|SHARED)_\w+)"
    r"|PALS_(APID|RANKID|NODEID|LOCAL_\w+)|FLUX_(TASK_\w+|JOB_SIZE)"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|NTASKS|NPROCS)"
)
"""What launchers set for each process, Horovod's, PyTorch's and TensorFlow's own words for a place included."""

KNOWN = tuple(dict.fromkeys(launcher.name for launcher in LAUNCHERS))
"""The names of the launchers, for messages."""


def detect(environ: Mapping[str, str], above: Sequence[Mapping[str, str]] | None = None) -> Launched | None:
    """What started this process, by its environment; None for a single process without a launcher.

    Args:
        environ: the process environment, ``os.environ`` or a recorded one.
        above: the environments of the processes above it, the parent's first; default: those of this process where
            ``environ`` is its own, none otherwise.
    Raises:
        LauncherError: a launcher was found but its rank or size is missing, not a number or out of range, or was set
            before the launcher was started. An unset rank never becomes rank 0.
    """
    found = [
        row
        for row in LAUNCHERS
        if all(name in environ for name in row.markers) and (row.proves is None or row.proves(environ))
    ]
    if found:
        if above is None:
            above = _environments_above() if environ is os.environ else ()

        def age(row: Launcher) -> int:
            # The first rank of a new job has the number of an old job's: only the size tells them apart.
            return min(_inherited(names, environ, above) for names in (row.rank, row.size or row.rank))

        row = min(found, key=age)
        if row is LAUNCHERS[-1]:  # `hvdkit launch` says the place that any launcher gave in these words, too
            said = _number(row, row.rank, environ), _number(row, row.size, environ)
            same = [one for one in found[:-1] if _number(one, one.rank, environ) == said[0]]
            same = [one for one in same if _number(one, one.size, environ) in (said[1], None)]
            row = min(same, key=age, default=row)
        if row.name == "horovodrun" and age(row) > _inherited(_RENDEZVOUS, environ, above):
            raise LauncherError(
                f"horovodrun started this process, but {row.rank[0]}={environ[row.rank[0]]} and {row.size[0]}="
                f"{environ.get(row.size[0])} were set before, by another job, and hide its own: every process would "
                f"train as this rank. Unset {row.rank[0]} and the like, or start the job with `hvdkit launch`."
            )
        return _read(row, environ)
    for row in LAUNCHERS:
        if row.name in _SIZE_IS_THEIRS and row.size[0] in environ:
            raise _incomplete(row, row.size[0], row.rank)
    return None


def _inherited(names: Iterable[str], environ: Mapping[str, str], above: Sequence[Mapping[str, str]]) -> int:
    """How many of the processes above, from the parent on, have the same value of the first name that is set."""
    name = next((name for name in names if name in environ), "")
    return next((count for count, one in enumerate(above) if one.get(name) != environ.get(name)), len(above))


def _environments_above() -> list[dict[str, str]]:
    """What the processes above this one were started with, the parent first; as far as Linux shows them."""
    found = []
    pid = os.getppid()
    with contextlib.suppress(OSError):  # of another user, or no Linux
        while pid > 1:
            directory = Path("/proc", str(pid))
            words = (directory / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
            found.append(dict(word.split("=", 1) for word in words if "=" in word))
            pid = int((directory / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return found


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what makes a process a rank of a job: what a launcher gives to those that it starts.

    What tunes a library stays, and so does what describes a batch job.
    """
    left = {name for name in environ if _PLACES.fullmatch(name)}
    if _RENDEZVOUS[0] in left:  # horovodrun chose these, for ranks over Gloo; over MPI they end Horovod by a crash
        left |= {"HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_IFACE"}
        if environ.get("NCCL_SOCKET_IFNAME") == environ.get("HOROVOD_GLOO_IFACE"):
            left.add("NCCL_SOCKET_IFNAME")
    return {name: value for name, value in environ.items() if name not in left}


def batch_job(environ: Mapping[str, str]) -> str | None:
    """The batch job around this process, such as "Slurm job 4711"; None outside of one."""
    return next((f"{name} job {environ[key]}" for name, key in BATCH_JOBS.items() if environ.get(key)), None)


def _read(row: Launcher, environ: Mapping[str, str]) -> Launched:
    rank, size = _number(row, row.rank, environ), _number(row, row.size, environ)
    if rank is None or (size is None and row.size):
        raise _incomplete(row, row.markers[0], row.rank if rank is None else row.size)
    if size is not None and not 0 <= rank < size:
        raise LauncherError(
            f"{row.name}: rank must be in 0 .. size-1, got {row.rank[0]}={rank} with a size of {size}; "
            "variables of two jobs are mixed in this environment."
        )
    local_rank = _number(row, row.local_rank, environ)
    counted = None if row.local_size_of is None else row.local_size_of(environ)
    local_size = _number(row, row.local_size, environ) if counted is None else counted
    if local_size is not None and not (local_rank or 0) < local_size <= (local_size if size is None else size):
        local_size = None  # that of an outer job: Horovod or MPI must say it
    return Launched(row.name, rank, size, local_rank, local_size)


def _incomplete(row: Launcher, found: str, missing: tuple[str, ...]) -> LauncherError:
    return LauncherError(
        f"{row.name} started this process ({found} is set) but {' or '.join(missing)} is not set, so its rank is "
        f"unknown; pass the launcher's whole environment on, or unset {found} (launchers known: {', '.join(KNOWN)})."
    )


def _number(row: Launcher, names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    for name in names:
        if name in environ:
            text = environ[name].strip()
            if not (text.isascii() and text.isdigit()):
                raise LauncherError(f"{row.name}: {name} must be a number, got {environ[name]!r}.")
            return int(text)
    return None


# Which hosts a job has ------------------------------------------------------------------------------------------------

_BRACKETS = re.compile(r"\[([^\]]*)\]")
_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
"""What is between two commas that are not inside brackets."""
_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NODEFILES = ("PBS_NODEFILE", "COBALT_NODEFILE")


def hosts_of_job(environ: Mapping[str, str]) -> list[str]:
    """The hosts that the batch system gave, each once, in its order; empty where nothing says so.

    They stand in Slurm's node lists, or in the file that PBS_NODEFILE, COBALT_NODEFILE or LSB_DJOB_RANKFILE names.

    Raises:
        LauncherError: a list or file that cannot be read.
    """
    for name in _NODELISTS:
        if environ.get(name):
            return expand_hostlist(environ[name])
    for name in _NODEFILES:
        if environ.get(name):
            return list(dict.fromkeys(_lines(name, environ[name])))
    if environ.get("LSB_DJOB_RANKFILE"):
        slots = _lines("LSB_DJOB_RANKFILE", environ["LSB_DJOB_RANKFILE"])  # a line for each slot
        counts = Counter(slots)
        # With jsrun, the first line is the service node of the batch script: one slot before hosts of many.
        service_node = slots[0] if slots and counts[slots[0]] == 1 < max(counts.values()) else None
        return [host for host in counts if host != service_node]
    return []


def expand_hostlist(hostlist: str) -> list[str]:
    """The hosts of a Slurm host list, in its order: ``n[1-3,7],gpu-[01-02]``.

    Raises:
        LauncherError: brackets that do not match, or a range that is none.
    Source: Slurm, scontrol(1), "show hostnames".
    """
    if _PART.sub("", hostlist).strip(","):
        raise LauncherError(f"the host list {hostlist!r} has brackets that do not match.")
    hosts: list[str] = []
    for part in filter(None, map(str.strip, _PART.findall(hostlist))):
        texts = _BRACKETS.split(part)  # every second one stood between brackets
        choices = [_expanded(text, hostlist) if place % 2 else [text] for place, text in enumerate(texts)]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _expanded(ranges: str, hostlist: str) -> list[str]:
    names = []
    for piece in ranges.split(","):
        first, dash, last = piece.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise LauncherError(f"the host list {hostlist!r} has {piece!r} where a number or a range is due.")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


def _lines(name: str, file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").split()
    except OSError as error:
        raise LauncherError(f"{name} names {file}, which cannot be read: {error.strerror}.") from error
