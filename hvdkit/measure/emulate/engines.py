"""What carries the collectives out. Each engine has a module of its own, imported on the rank that uses it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import InvalidArgumentError, LauncherError, MissingFrameworkError
from hvdkit.measure.emulate import check
from hvdkit.measure.emulate.check import ALL_TO_ALL, ALLREDUCE, REDUCE_SCATTER
from hvdkit.measure.emulate.run_job import ReplayJob

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


class EngineOperation:
    """One collective of the plan on this rank: loaded, started and finished once in every trial.

    Both what is given and what is got have one dimension and ``check.storage(dtype)``, wherever the engine keeps them.

    Args:
        given: what this rank gives, of shape (elements,).
        got: what it gets; default: the same memory.
    """

    def __init__(self, given: Any, got: Any = None) -> None:
        self.given, self.got = given, given if got is None else got

    def load(self, values: NDArray[Any]) -> None:
        """Take what this rank gives; outside of the time that is measured."""
        self.given[:] = values

    def start(self) -> None:
        """Give it to the engine, which may return before anything is done; nothing where operations block."""

    def finish(self) -> None:
        """Return when this rank has its result."""
        raise NotImplementedError

    def result(self) -> NDArray[Any]:
        """What this rank got; outside of the time that is measured."""
        return np.asarray(self.got)


@dataclass
class Engine:
    """A connection to all ranks.

    Attributes:
        rank, size: of this process in the job.
        operation: of a place in the plan, a collective, elements and their type: what carries it out; asked for in the
            same order on every rank.
        barrier: returns when all ranks have called it.
        close: parts from the others; nothing can be done afterwards.
        overlaps: all operations of a step are started before the first one is finished.
        notes: what a reader of the numbers should know, full sentences.
    """

    rank: int
    size: int
    operation: Callable[[int, str, int, str], EngineOperation]
    barrier: Callable[[], object]
    close: Callable[[], object]
    overlaps: bool = False
    notes: tuple[str, ...] = ()


def refuse(job: ReplayJob) -> None:
    """Refuse what the engine cannot do whatever the ranks are, before any is started.

    Raises:
        InvalidArgumentError: a ring of all-to-alls, another engine's algorithm, a type that it does not take, or one
            whose sums over so many ranks cannot be checked.
    """
    asked = job.asked
    if asked.algorithm == "ring" and asked.engine != "mpi":
        raise InvalidArgumentError(
            f"--algorithm ring is this tool's own ring over MPI messages, got --engine {asked.engine}; use --engine "
            "ring, or --algorithm library."
        )
    if asked.algorithm == "ring" and asked.collective == ALL_TO_ALL:
        raise InvalidArgumentError(
            "An all-to-all over a ring would send every block through all the ranks between; use --engine mpi, or "
            "another --collective."
        )
    by = "ring" if asked.algorithm == "ring" else asked.engine
    known = TYPES[by]
    for one in job.plan.collectives:
        if one.dtype not in known:
            others = [name for name, types in TYPES.items() if one.dtype in types]
            does = "cannot add" if asked.collective in (ALLREDUCE, REDUCE_SCATTER) else "does not carry here"
            raise InvalidArgumentError(
                f"{one.name!r} is {one.dtype}, which --engine {by} {does}; use --engine {' or '.join(others)}, or one "
                f"of {', '.join(known)}."
            )
        if asked.check:
            check.refuse(asked.collective, one.dtype, asked.ranks)


def connect(job: ReplayJob) -> Engine:
    """Connect this rank to the others; a collective.

    Raises:
        MissingFrameworkError: the engine's package is not installed here.
        LauncherError: the engine sees other ranks than were started.
    """
    name, ranks = job.asked.engine, job.asked.ranks
    try:
        engine: Engine = importlib.import_module(f"hvdkit.measure.emulate.engines_{name}").connect(job)
    except ImportError as error:
        if isinstance(error, MissingFrameworkError):
            raise
        raise MissingFrameworkError(f"--engine {name} cannot be used here ({error}); {_MISSING[name]}.") from error
    if engine.size != ranks:
        raise LauncherError(
            f"{ranks} ranks were started, and --engine {name} sees {engine.size} (process {os.getpid()}): "
            "the launcher belongs to another MPI; run 'hvdkit doctor', or choose another --launcher."
        )
    return engine
