"""Gradients that travel in half precision and are added up in their own; the inside of ``hvdkit.arrays``.

MPI has no half precision to add up. So each rank adds up one part of the buffer: it receives that part from all ranks
in float16 (MPI_Alltoall), adds it up in the gradients' own type, rounds the result once and sends it to all
(MPI_Allgather). That is half of the bytes of a ring's allreduce, and two roundings, to 11 bits each, whatever the
number of ranks: a mean is off by at most about 2**-10 of the largest of the gradients that it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class HalfExchange:
    """Adds up one buffer over the ranks, in place.

    Args:
        payload: (m,), float32 or float64; the gradients.
        comm: of the ranks.
        mean: what the sum is multiplied by at last, when it is a mean: 1/size, so that what is rounded before, of each
            rank, is near its gradient, and small ones are not lost; else 1.
    """

    def __init__(self, payload: Array, comm: Any, mean: float) -> None:
        self._payload, self._comm, self._mean = payload, comm, mean
        size = comm.Get_size()
        part = -(-len(payload) // size)
        self._mine = np.zeros(size * part, dtype=np.float16)
        self._parts = np.empty((size, part), dtype=np.float16)
        self._result = np.empty(part, dtype=np.float16)

    def requests(self, factor: float) -> Iterator[Any]:
        """The MPI requests to be completed, each before the next is asked for; the payload is then the result.

        Args:
            factor: what this rank's gradients are multiplied by in the result.
        """
        before = factor / self._mean
        count = len(self._payload)
        _rounded(self._payload, before, self._mine[:count])
        yield self._comm.Ialltoall(self._mine.view(np.uint16), self._parts.view(np.uint16))
        total = self._parts[0].astype(self._payload.dtype)
        for part in self._parts[1:]:
            total += part
        _rounded(total, self._mean, self._result)
        yield self._comm.Iallgather(self._result.view(np.uint16), self._mine.view(np.uint16))
        self._payload[:] = self._mine[:count]


def _rounded(values: Array, factor: float, half: Array) -> None:
    """Beyond 65504 a gradient becomes infinite, which a loss scale looks for."""
    np.multiply(values, factor, out=half, casting="same_kind")
