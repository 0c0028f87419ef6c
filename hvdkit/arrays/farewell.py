"""A rank that ends early must not leave the others waiting for it; the inside of ``hvdkit.arrays.init``.

Under MPI a process that ends while others wait in a collective waits itself, in MPI_Finalize, and the job hangs. So a
rank that ends tells those that do not end with it, and a rank that hears this while it waits in hvdkit ends the job.
One that hears it and does something else, such as a last evaluation, goes on.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

_TOGETHER_S = 1.0  # ranks that end within this time end together
_LOOK_S = 0.5
_CALLS_MPI = (
    "checkpoint.py", "mpi.py", "optimizer.py", "state.py", "exchange/buffers.py", "exchange/cuda.py",
    "exchange/half.py", "exchange/layout.py", "exchange/shared.py",
)  # fmt: skip
_HERE = frozenset(str(Path(__file__).parent / name) for name in _CALLS_MPI)


class Farewell:
    """Watches over the end of this process and of the others; made on every rank, a collective.

    Args:
        comm: all ranks; the messages travel apart from others.
        listens: whether a second thread may call MPI. Without it this rank says farewell, and hears none.
    """

    def __init__(self, comm: Any, listens: bool) -> None:
        self._comm, self._process = comm.Dup(), os.getpid()
        self._ends = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="hvdkit-farewell", daemon=True)
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
        waited: set[Any] = set()
        while not self._ends.wait(_LOOK_S):
            waits = _waiting()
            if waits & waited and (gone := self._gone()) is not None:
                sys.stderr.write(
                    f"hvdkit: rank {gone} ended, and rank {self._comm.Get_rank()} waits for it; the job is ended. "
                    f"Look for the error of rank {gone}, or for fewer steps there.\n"
                )
                sys.stderr.flush()
                self._comm.Abort(1)
            waited = waits

    def _gone(self) -> int | None:
        from mpi4py import MPI

        status = MPI.Status()
        return int(status.Get_source()) if self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) else None


def _waiting() -> set[tuple[int, int]]:
    """Where threads are in a function that calls MPI: the frame and its instruction, unchanged while it waits.

    The loader is none of them: one that reads a slow disk stands still, too.
    """
    return {(id(frame), frame.f_lasti) for frame in sys._current_frames().values() if frame.f_code.co_filename in _HERE}
