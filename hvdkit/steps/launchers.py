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


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "horovodrun",
        markers=("HOROVOD_RANK",),
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
    ),
    Launcher(
        "torchrun",
        markers=("TORCHELASTIC_RUN_ID",),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
    ),
    Launcher(
        "jsrun",
        markers=("JSM_NAMESPACE_RANK",),
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    Launcher(
        "Open MPI",
        markers=("OMPI_COMM_WORLD_RANK",),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        "MVAPICH2",
        markers=("MV2_COMM_WORLD_RANK",),
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    *(
        Launcher(
            "PALS",
            markers=markers,
            rank=("PALS_RANKID", "PMI_RANK"),
            size=("PMI_SIZE",),
            local_rank=("PALS_LOCAL_RANKID",),
            local_size=("PALS_LOCAL_SIZE",),
        )
        for markers in (("PALS_LOCAL_RANKID",), ("PALS_RANKID",), ("PALS_APID", "PMI_RANK"))  # versions differ
    ),
    Launcher(
        "Flux",
        markers=("FLUX_TASK_RANK",),
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
    ),
    Launcher(  # and Intel MPI, which has the same Hydra
        "MPICH",
        markers=("PMI_RANK", "MPI_LOCALRANKID"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    Launcher(
        "aprun",
        markers=("ALPS_APP_PE",),
        rank=("ALPS_APP_PE",),
        size=(),
    ),
    Launcher(
        "srun",
        markers=("SLURM_PROCID",),
        rank=("SLURM_PROCID",),
        # SLURM_NTASKS is what the job asked for; a step of fewer tasks (srun -n 2) has its own count.
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_NTASKS_PER_NODE",),
        proves=inside_srun,
        local_size_of=_tasks_on_this_node,
    ),
    Launcher(  # other PMI launchers, and a Hydra that says nothing of the host
        "MPICH",
        markers=("PMI_RANK", "PMI_SIZE"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
    ),
    Launcher(  # launchers that speak torchrun's language without being torchrun
        "torchrun",
        markers=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
    ),
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
    local_rank, local_size = _number(row, row.local_rank, environ), _local_size(row, environ)
    if local_size is not None and not (local_rank or 0) < local_size <= (local_size if size is None else size):
        local_size = None  # that of an outer job: Horovod or MPI must say it
    return Launched(row.name, rank, size, local_rank, local_size)


def _incomplete(row: Launcher, found: str, missing: tuple[str, ...]) -> LauncherError:
    return LauncherError(
        f"{row.name} started this process ({found} is set) but {' or '.join(missing)} is not set, so its rank is "
        f"unknown; pass the launcher's whole environment on, or unset {found} (launchers known: {', '.join(KNOWN)})."
    )


def _local_size(row: Launcher, environ: Mapping[str, str]) -> int | None:
    counted = None if row.local_size_of is None else row.local_size_of(environ)
    return _number(row, row.local_size, environ) if counted is None else counted


def _number(row: Launcher, names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    for name in names:
        if name in environ:
            text = environ[name].strip()
            if not (text.isascii() and text.isdigit()):
                raise LauncherError(f"{row.name}: {name} must be a number, got {environ[name]!r}.")
            return int(text)
    return None
