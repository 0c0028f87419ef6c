"""No rank may be left waiting for one that ends early, or waits elsewhere; the inside of ``hvdkit.arrays.init``.

Under MPI a process that ends while others wait in a collective waits itself, in MPI_Finalize, and the job hangs. So a
rank that ends tells those that do not end with it, and a rank that hears this while it waits in hvdkit ends the job.
One that hears it and does something else, such as a last evaluation, goes on. ``StepCounts`` sees ranks that have
reduced a different number of times and wait for one another.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from hvdkit.core.communicator import OverMpi
from hvdkit.observe.allreduce_counts import AllreduceCounts
from hvdkit.steps import passes

_TOGETHER_S = 1.0  # ranks that end within this time end together
_LOOK_S = 0.5
_WAIT = {"Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv", "Reduce_scatter", "allgather"}
_WAIT |= {"Barrier", "Bcast", "Dup", "Split_type", "bcast"}
_waits: dict[int, int] = {}  # thread that waits for other ranks: the number of this wait, which no other has
_numbers = count()
in_steps: set[int] = set()
"""Threads that average for the first one, which waits for them where JAX runs a step behind the program."""
apart: list[Any] = []
"""Communicators of some ranks only, which may rightly reduce less often than others."""

Result = TypeVar("Result")


def waits(call: Callable[..., Result]) -> Callable[..., Result]:
    """``call``, which waits for other ranks, with its thread marked meanwhile. Costs a fraction of a microsecond."""
    this_thread, number = threading.get_ident, _numbers.__next__

    def marked(*arguments: Any, **named: Any) -> Result:
        thread = this_thread()
        _waits[thread] = number()
        try:
            return call(*arguments, **named)
        finally:
            _waits.pop(thread, None)

    return marked


class Marked:
    """A communicator of hvdkit's own: whatever of its calls waits for other ranks is marked. Requests are not."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name in _WAIT:
            found = waits(found)
            setattr(self, name, found)
        return found


class StepCounts(AllreduceCounts):
    """How often each rank has reduced, and which of them wait; made and begun on every rank, a collective.

    Args:
        comm: all ranks; the messages travel apart from others.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__()
        from mpi4py import MPI

        self._comm = comm
        self._main = threading.main_thread().ident
        self.in_graphs(lambda: (passes.told(), passes.told()))
        self.start(OverMpi(comm, MPI))
        atexit.register(self.leave)

    def waits(self) -> bool:
        return self._main in _waits or not in_steps.isdisjoint(_waits.copy())

    def all_meet(self) -> bool:
        return not apart

    def end(self, sentence: str) -> None:
        """Ends the job, which no error in a waiting rank can do."""
        sys.stderr.write(f"hvdkit: {sentence}\n")
        sys.stderr.flush()
        time.sleep(_LOOK_S)
        self._comm.Abort(1)


class ExitWatchdog:
    """Watches over the end of this process and of the others; made on every rank, a collective.

    Args:
        comm: all ranks; the messages travel apart from others.
        listens: whether a second thread may call MPI. Without it this rank tells of its end, and hears of none.
    """

    def __init__(self, comm: Any, listens: bool) -> None:
        self._comm, self._process = comm.Dup(), os.getpid()
        self._ends = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="hvdkit exit watchdog", daemon=True)
        if listens:
            self._listener.start()
        atexit.register(self._leave)

    def _leave(self) -> None:
        if os.getpid() != self._process:  # forked, by a loader perhaps: not a rank, and must not call MPI
            return
        self._ends.set()
        if self._listener.is_alive():
            self._listener.join()
        together, deadline = self._comm.Ibarrier(), time.monotonic() + _TOGETHER_S
        while not together.Test():
            if time.monotonic() > deadline:
                self._tell()
                return
            time.sleep(0.005)

    def _tell(self) -> None:
        rank = self._comm.Get_rank()
        for other in range(self._comm.Get_size()):
            if other != rank:
                self._comm.Isend(bytearray(0), other)

    def _listen(self) -> None:
        before: set[tuple[int, int]] = set()
        while not self._ends.wait(_LOOK_S):
            now = set(_waits.copy().items())
            if now & before and (gone := self._gone()) is not None:  # the same wait, at two looks
                sys.stderr.write(
                    f"hvdkit: rank {gone} ended, and rank {self._comm.Get_rank()} waits for it; the job is ended. "
                    f"Look for the error of rank {gone}, or for fewer steps there.\n"
                )
                sys.stderr.flush()
                self._comm.Abort(1)
            before = now

    def _gone(self) -> int | None:
        from mpi4py import MPI

        status = MPI.Status()
        return int(status.Get_source()) if self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) else None
