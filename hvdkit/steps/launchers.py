"""Step 1: which launcher started this process, read from its environment variables.

A launcher is a row in ``LAUNCHERS``. Rank and size always come from one row. The order is the order of nesting,
innermost first: what a program starts inside a batch job sets variables beside those of the job, so that
``horovodrun`` and ``torchrun`` stand before MPI, and MPI before Slurm (Open MPI starts its daemons with ``srun``,
whose variables the ranks inherit). jsrun, PALS and Flux set the variables of an MPI library beside their own, with the
same values, and stand before it. A row counts as found when all variables of ``markers`` are set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdkit.errors import LauncherError


@dataclass(frozen=True, slots=True)
class Launcher:
    """Names of the environment variables that a launcher sets for each process.

    Attributes:
        name: as users say it.
        markers: variables that prove that this launcher started the process.
        rank, size, local_rank, local_size: names to read, the first that is set; () where it sets none, so that MPI or
            Horovod must say it.
        proves: a further condition on the environment, or None.
        local_size_of: reads the local size where no variable holds it as a number; None, or what it returns as None,
            leaves it to ``local_size``.
    """

    name: str
    markers: tuple[str, ...]
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    proves: Callable[[Mapping[str, str]], bool] | None = None
    local_size_of: Callable[[Mapping[str, str]], int | None] | None = None


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher's environment says of this process; None where it says nothing."""

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


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

KNOWN = tuple(dict.fromkeys(launcher.name for launcher in LAUNCHERS))
"""The names of the launchers, for messages."""


def detect(environ: Mapping[str, str]) -> Launched | None:
    """What started this process, by its environment; None for a single process without a launcher.

    Args:
        environ: the process environment, ``os.environ`` or a recorded one.
    Raises:
        LauncherError: a launcher was found but its rank or size is missing, not a number or out of range. An unset
            rank never becomes rank 0.
    """
    for row in LAUNCHERS:
        if all(name in environ for name in row.markers) and (row.proves is None or row.proves(environ)):
            return _read(row, environ)
    for row in LAUNCHERS:
        if row.name in _SIZE_IS_THEIRS and row.size[0] in environ:
            raise _incomplete(row, row.size[0], row.rank)
    return None


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
