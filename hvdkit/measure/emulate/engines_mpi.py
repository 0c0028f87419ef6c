"""MPI through mpi4py's buffers: the library's own collectives, or the ring over its point-to-point messages."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.measure.emulate import ring
from hvdkit.measure.emulate.check import ALL_TO_ALL, ALLREDUCE, BROADCAST, REDUCE_SCATTER, ROOT, split, storage
from hvdkit.measure.emulate.engines import Engine, EngineOperation
from hvdkit.measure.emulate.run_job import ReplayJob

_STEPS = {
    ALLREDUCE: (ring.allreduce,),
    REDUCE_SCATTER: (ring.reduce_scatter, ring.all_gather),
    BROADCAST: (ring.broadcast,),
}


def connect(job: ReplayJob) -> Engine:
    """Start MPI on all ranks of MPI_COMM_WORLD, without its locks: one thread of this process uses it."""
    importlib.import_module("mpi4py").rc.thread_level = "single"
    library = importlib.import_module("mpi4py.MPI")
    comm = library.COMM_WORLD

    def operation(_index: int, collective: str, elements: int, dtype: str) -> EngineOperation:
        array = np.empty(elements, storage(dtype))
        return (Ring if job.asked.algorithm == "ring" else Library)(library, collective, array)

    return Engine(comm.Get_rank(), comm.Get_size(), operation, comm.Barrier, library.Finalize)


class Ring(EngineOperation):
    """A collective by this tool's ring, in place: messages are bytes, whatever the type of the elements."""

    def __init__(self, library: Any, collective: str, array: NDArray[Any]) -> None:
        super().__init__(array)
        comm = library.COMM_WORLD
        self._steps = _STEPS[collective]
        self._transport = ring.RingTransport(
            comm.Get_rank(),
            comm.Get_size(),
            send=lambda part, to: comm.Isend(part.view(np.uint8), to).Wait,
            receive=lambda part, source: comm.Irecv(part.view(np.uint8), source).Wait,
        )

    def finish(self) -> None:
        for step in self._steps:
            step(self._transport, self.given)


class Library(EngineOperation):
    """A collective by whichever algorithm the MPI library chooses."""

    def __init__(self, library: Any, collective: str, array: NDArray[Any]) -> None:
        self._in_place, self._comm, self._collective = library.IN_PLACE, library.COMM_WORLD, collective
        size, rank = self._comm.Get_size(), self._comm.Get_rank()
        self._shares = split(len(array), size)
        received = self._shares[rank] * size if collective == ALL_TO_ALL else len(array)
        super().__init__(array, array if collective in (ALLREDUCE, BROADCAST) else np.empty(received, array.dtype))
        self._own = np.empty(self._shares[rank], array.dtype)

    def finish(self) -> None:
        comm = self._comm
        if self._collective == ALLREDUCE:
            comm.Allreduce(self._in_place, self.given)
        elif self._collective == REDUCE_SCATTER:
            comm.Reduce_scatter(self.given, self._own, recvcounts=self._shares)
            comm.Allgatherv(self._own, [self.got, self._shares])
        elif self._collective == BROADCAST:
            comm.Bcast(self.given, root=ROOT)
        else:
            comm.Alltoallv([self.given, self._shares], [self.got, [len(self._own)] * len(self._shares)])
