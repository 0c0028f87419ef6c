"""What carries the collectives out. An engine is a row in ``ENGINES``, imported on the rank that uses it."""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol

from numpy.typing import NDArray

from hvdkit.errors import InvalidArgumentError, LauncherError, MissingFrameworkError
from hvdkit.measure.emulate import check
from hvdkit.measure.emulate.check import ALL_TO_ALL, ALLREDUCE, REDUCE_SCATTER
from hvdkit.measure.emulate.run_job import Job

ENGINES = {
    "horovod": "hvdkit.measure.emulate.engines_horovod:connect",
    "mpi": "hvdkit.measure.emulate.engines_mpi:connect",
    "torch": "hvdkit.measure.emulate.engines_torch:connect",
}
"""Name to "module:function", a function that takes the job and connects this rank to the others."""

TYPES = {
    "horovod": ("float32", "float64", "float16", "int32", "int64"),
    "mpi": ("float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64"),
    "ring": ("float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "int64"),
    "torch": ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"),
}
"""Types that can be added, by the engine's name: horovod/torch/mpi_ops_v2.cc, MPI 4.1 section 6.9.2, NumPy, Gloo."""
_MISSING = {
    "horovod": "run 'hvdkit install'",
    "mpi": "run \"pip install 'hvdkit[mpi]'\", with the MPI that starts the ranks loaded",
    "torch": "run \"pip install 'hvdkit[torch]'\"",
}


class Operation(Protocol):
    """One collective of the plan on this rank: loaded, started and finished once in every trial.

    What is given and what is got are NumPy arrays of ``check.storage(dtype)``, wherever the engine keeps them.
    """

    def load(self, values: NDArray[Any]) -> None:
        """Take what this rank gives, shape (elements,); outside of the time that is measured."""

    def start(self) -> None:
        """Give it to the engine, which may return before anything is done."""

    def finish(self) -> None:
        """Return when this rank has its result."""

    def result(self) -> NDArray[Any]:
        """What this rank got, one-dimensional; outside of the time that is measured."""


class Engine(Protocol):
    """A connection to all ranks.

    Attributes:
        rank, size: of this process in the job.
        overlaps: all operations of a step are started before the first one is finished.
        notes: what a reader of the numbers should know, full sentences.
    """

    rank: int
    size: int
    overlaps: bool
    notes: tuple[str, ...]

    def operation(self, index: int, collective: str, elements: int, dtype: str) -> Operation:
        """The operation at a place of the plan; the same calls in the same order on every rank."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def close(self) -> None:
        """Part from the others; nothing can be done afterwards."""


def refuse(job: Job) -> None:
    """Refuse what the engine cannot do whatever the ranks are, before any is started.

    Raises:
        InvalidArgumentError: a ring of all-to-alls, another engine's algorithm, a type that it does not take, or one
            whose sums over so many ranks cannot be checked.
    """
    if job.algorithm == "ring" and job.engine != "mpi":
        raise InvalidArgumentError(
            f"--algorithm ring is this tool's own ring over MPI messages, got --engine {job.engine}; use --engine "
            "ring, or --algorithm library."
        )
    if job.algorithm == "ring" and job.collective == ALL_TO_ALL:
        raise InvalidArgumentError(
            "An all-to-all over a ring would send every block through all the ranks between; use --engine mpi, or "
            "another --collective."
        )
    known = TYPES["ring" if job.algorithm == "ring" else job.engine]
    for one in job.plan.collectives:
        if one.dtype not in known:
            by = "ring" if job.algorithm == "ring" else job.engine
            others = [name for name, types in TYPES.items() if one.dtype in types]
            does = "cannot add" if job.collective in (ALLREDUCE, REDUCE_SCATTER) else "does not carry here"
            raise InvalidArgumentError(
                f"{one.name!r} is {one.dtype}, which --engine {by} {does}; use --engine {' or '.join(others)}, or one "
                f"of {', '.join(known)}."
            )
        if job.check:
            check.refuse(job.collective, one.dtype, job.ranks)


def connect(job: Job) -> Engine:
    """Connect this rank to the others; a collective.

    Raises:
        MissingFrameworkError: the engine's package is not installed here.
        LauncherError: the engine sees other ranks than were started.
    """
    module, _, function = ENGINES[job.engine].partition(":")
    try:
        engine: Engine = getattr(importlib.import_module(module), function)(job)
    except ImportError as error:
        if isinstance(error, MissingFrameworkError):
            raise
        raise MissingFrameworkError(
            f"--engine {job.engine} cannot be used here ({error}); {_MISSING.get(job.engine, 'install it')}."
        ) from error
    if engine.size != job.ranks:
        raise LauncherError(
            f"{job.ranks} ranks were started, and --engine {job.engine} sees {engine.size} (process {os.getpid()}): "
            "the launcher belongs to another MPI; run 'hvdkit doctor', or choose another --launcher."
        )
    return engine
