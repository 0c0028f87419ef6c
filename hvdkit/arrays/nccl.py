"""Gradients on CUDA GPUs, added up over NCCL with CuPy; the inside of ``hvdkit.arrays``. Not tried on a GPU yet."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.arrays.exit_watchdog import waits
from hvdkit.arrays.sum_buffer import Leaf, Ranks, SumBuffer, views_of
from hvdkit.errors import InvalidArgumentError


def is_usable(comm: Any) -> bool:
    """Whether every rank has CuPy with NCCL, and a GPU of its own, without which NCCL refuses; a collective."""
    gpu = None
    if importlib.util.find_spec("cupy") is not None:
        cuda = importlib.import_module("cupy").cuda
        if getattr(cuda, "nccl", None) is not None and cuda.nccl.available:
            gpu = f"{os.uname().nodename} {cuda.runtime.deviceGetPCIBusId(cuda.runtime.getDevice())}"
    return has_own_gpus(comm.allgather(gpu))


def has_own_gpus(gpus: Sequence[str | None]) -> bool:
    """Whether each rank has a GPU, and no two have the same: host and bus id of each rank's, None where it has none."""
    return None not in gpus and len(set(gpus)) == len(gpus)


class NcclBuffer(SumBuffer):
    """As ``SumBuffer``, in the memory of a GPU. Results are CuPy's arrays, which any framework takes over by DLPack.

    Args:
        leaves, sent, ranks: see ``SumBuffer``.
    Source: NCCL user guide, "Creating a communicator" (ncclGetUniqueId, ncclCommInitRank).
    """

    def __init__(self, leaves: Sequence[Leaf], sent: np.dtype[Any], ranks: Ranks) -> None:
        if sent.kind == "c":
            raise InvalidArgumentError(f"{leaves[0].path} is complex, which NCCL does not add up; give its parts.")
        if ranks.compression != "none":
            raise InvalidArgumentError(
                f"compression={ranks.compression!r} packs arrays on the host, and {leaves[0].path} is on a GPU; leave "
                "it out, or give host arrays."
            )
        self._cp = importlib.import_module("cupy")
        self._leaves, self.kind, self.packed = leaves, "none", {}
        self.payload = self._cp.zeros(sum(leaf.size for leaf in leaves), dtype=sent)
        self.views = views_of(self.payload, leaves)
        nccl, comm = self._cp.cuda.nccl, ranks.comm
        self._nccl: Any = None
        if comm.Get_size() > 1:
            identity = comm.bcast(nccl.get_unique_id() if comm.Get_rank() == 0 else None, root=0)
            self._nccl = waits(nccl.NcclCommunicator)(comm.Get_size(), identity, comm.Get_rank())

    def in_one_message(self) -> None:
        """Its head travels over MPI."""

    def put(self, position: int, gradient: Any, factor: float | None) -> None:
        """See ``SumBuffer.put``."""
        leaf, view = self._leaves[position], self.views[position]
        if gradient is None:
            if factor is None:
                view.fill(0)
            return
        values = self._cp.from_dlpack(gradient) if hasattr(gradient, "__dlpack__") else self._cp.asarray(gradient)
        self._require_shape(leaf, values.shape)
        if factor != 0.0:
            view[...] = values if factor is None else view + values.astype(view.dtype) * factor

    def result(self, position: int) -> Any:
        """A reduced gradient in its own type."""
        return self.views[position].astype(self._leaves[position].dtype, copy=False)

    def announce(self, own: float) -> None:
        """Nothing here needs to know before."""

    def exchange(self, own: float, factor: float) -> None:
        """See ``SumBuffer.exchange``; the sum is ready when what comes next in the stream runs."""
        self.payload *= own * factor
        if self._nccl is None:
            return
        flat: Any = self.payload
        nccl, stream = self._cp.cuda.nccl, self._cp.cuda.get_current_stream()
        kind = nccl.NCCL_FLOAT32 if flat.dtype.char == "f" else nccl.NCCL_FLOAT64
        self._nccl.allReduce(flat.data.ptr, flat.data.ptr, flat.size, kind, nccl.NCCL_SUM, stream.ptr)
