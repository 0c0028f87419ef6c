"""MPI through mpi4py's buffers: the library's own collectives, or the ring over its point-to-point messages."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.measure.emulate import ring
from hvdkit.measure.emulate.check import ALL_TO_ALL, ALLREDUCE, BROADCAST, REDUCE_SCATTER, ROOT, split, storage
from hvdkit.measure.emulate.run_job import ReplayJob


def connect(job: ReplayJob) -> MpiEngine:
    """Start MPI, without its locks: one thread of this process uses it."""
    importlib.import_module("mpi4py").rc.thread_level = "single"
    return MpiEngine(importlib.import_module("mpi4py.MPI"), job.asked.algorithm)


class MpiEngine:
    """All ranks of MPI_COMM_WORLD; see ``engines.Engine``."""

    overlaps = False

    def __init__(self, library: Any, algorithm: str) -> None:
        self._library = library
        self._comm = library.COMM_WORLD
        self._by_ring = algorithm == "ring"
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self.notes: tuple[str, ...] = ()

    def operation(self, index: int, collective: str, elements: int, dtype: str) -> Ring | Library:  # noqa: ARG002
        array = np.empty(elements, storage(dtype))
        if self._by_ring:
            return Ring(Messages(self._comm, self.rank, self.size), collective, array)
        return Library(self._library, self._comm, collective, array)

    def barrier(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        self._library.Finalize()


class Messages:
    """Point-to-point messages as bytes, whatever the type of the elements; see ``ring.RingTransport``."""

    def __init__(self, comm: Any, rank: int, size: int) -> None:
        self._comm = comm
        self.rank = rank
        self.size = size

    def send(self, array: NDArray[Any], to: int) -> _Message:
        return _Message(self._comm.Isend(array.view(np.uint8), to))

    def receive(self, array: NDArray[Any], source: int) -> _Message:
        return _Message(self._comm.Irecv(array.view(np.uint8), source))


class _Message:
    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()


class Ring:
    """A collective by this tool's ring, in place."""

    def __init__(self, messages: ring.RingTransport, collective: str, array: NDArray[Any]) -> None:
        self._messages = messages
        self._array = array
        self._steps = {
            ALLREDUCE: (ring.allreduce,),
            REDUCE_SCATTER: (ring.reduce_scatter, ring.all_gather),
            BROADCAST: (ring.broadcast,),
        }[collective]

    def load(self, values: NDArray[Any]) -> None:
        self._array[:] = values

    def start(self) -> None:
        """Nothing: the ring needs this thread to go round."""

    def finish(self) -> None:
        for step in self._steps:
            step(self._messages, self._array)

    def result(self) -> NDArray[Any]:
        return self._array


class Library:
    """A collective by whichever algorithm the MPI library chooses."""

    def __init__(self, library: Any, comm: Any, collective: str, array: NDArray[Any]) -> None:
        self._library, self._comm = library, comm
        self._array = array
        size, rank = comm.Get_size(), comm.Get_rank()
        self._shares = split(len(array), size)
        received = self._shares[rank] * size if collective == ALL_TO_ALL else len(array)
        self._result = array if collective in (ALLREDUCE, BROADCAST) else np.empty(received, array.dtype)
        self._own = np.empty(self._shares[rank], array.dtype)
        self.finish = {
            ALLREDUCE: self._allreduce,
            REDUCE_SCATTER: self._reduce_scatter,
            BROADCAST: self._broadcast,
            ALL_TO_ALL: self._all_to_all,
        }[collective]

    def load(self, values: NDArray[Any]) -> None:
        self._array[:] = values

    def start(self) -> None:
        """Nothing: the operations block."""

    def result(self) -> NDArray[Any]:
        return self._result

    def _allreduce(self) -> None:
        self._comm.Allreduce(self._library.IN_PLACE, self._array)

    def _reduce_scatter(self) -> None:
        self._comm.Reduce_scatter(self._array, self._own, recvcounts=self._shares)
        self._comm.Allgatherv(self._own, [self._result, self._shares])

    def _broadcast(self) -> None:
        self._comm.Bcast(self._array, root=ROOT)

    def _all_to_all(self) -> None:
        own = len(self._own)
        self._comm.Alltoallv([self._array, self._shares], [self._result, [own] * self._comm.Get_size()])
