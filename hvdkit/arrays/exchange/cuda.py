"""Gradients on a CUDA GPU, over NCCL, a CUDA-aware MPI, or the host; one inside of ``hvdkit.arrays``. Needs CuPy.

As little as possible happens here: which way is taken is decided, and tested without a GPU, in ``plan.py``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdkit.arrays import mpi
from hvdkit.arrays.exchange import plan
from hvdkit.arrays.exchange.buffers import Leaf, Ranks
from hvdkit.arrays.exit_watchdog import waits
from hvdkit.core.communicator import ALLREDUCE
from hvdkit.errors import InvalidArgumentError, MissingFrameworkError


def cupy() -> Any:
    """CuPy.

    Raises:
        MissingFrameworkError: it cannot be imported.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise MissingFrameworkError(
            f"arrays on a GPU are reduced with CuPy, and importing it failed ({error}); run `pip install "
            "cupy-cuda12x`, or give host arrays."
        ) from error


def machine(comm: Any) -> plan.Machine:
    """What can be used between these ranks, the same on each of them; a collective."""
    cp = cupy()
    nccl = importlib.util.find_spec("cupy.cuda.nccl") is not None and bool(getattr(cp.cuda, "nccl", None))
    bus = cp.cuda.runtime.deviceGetPCIBusId(cp.cuda.runtime.getDevice())
    query = getattr(ctypes.CDLL(None), "MPIX_Query_cuda_support", None)  # some libraries have none
    aware = plan.is_cuda_aware(None if query is None else int(query()), os.environ)
    found = comm.allgather((bool(nccl and cp.cuda.nccl.available), aware, f"{os.uname().nodename} {bus}"))
    return plan.Machine(
        nccl=all(one[0] for one in found),
        cuda_aware=all(one[1] for one in found),
        own_gpus=plan.own_gpus([one[2] for one in found]),
    )


def nccl_communicator(comm: Any) -> Any:
    """NCCL between these ranks: rank 0 draws the unique id, and MPI brings it to the others; a collective.

    Source: NCCL user guide, "Creating a communicator" (ncclGetUniqueId, ncclCommInitRank).
    """
    nccl = cupy().cuda.nccl
    identity = comm.bcast(nccl.get_unique_id() if comm.Get_rank() == 0 else None, root=0)
    return waits(nccl.NcclCommunicator)(comm.Get_size(), identity, comm.Get_rank())


class CudaBuffer:
    """As ``HostBuffer``, in the memory of a GPU.

    Args:
        leaves, sent, ranks: see ``HostBuffer``; half precision is for NCCL, which adds it up in half precision.
        path: one of ``arrays.exchange.plan``'s for GPUs.
    """

    def __init__(self, leaves: Sequence[Leaf], sent: np.dtype[Any], path: str, ranks: Ranks) -> None:
        if path == plan.NCCL and sent.kind == "c":
            raise InvalidArgumentError(f"{leaves[0].path} is complex, which NCCL does not add up; give its parts.")
        self._cp, self._leaves, self._path, self._comm, self._mean = cupy(), leaves, path, ranks.comm, ranks.mean
        self.payload = self._cp.zeros(sum(leaf.size for leaf in leaves), dtype=sent)
        ends = np.cumsum([leaf.size for leaf in leaves]).tolist()
        self.views = [
            self.payload[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)
        ]
        if ranks.compression in ("bf16", "int8", "auto"):
            raise InvalidArgumentError(
                f"compression={ranks.compression!r} packs arrays on the host, and {leaves[0].path} is on a GPU; use "
                "'fp16', or give host arrays."
            )
        self._half = ranks.compression == "fp16" and path == plan.NCCL and sent.kind == "f"
        over_nccl = path == plan.NCCL and self._comm.Get_size() > 1
        self._nccl: Any = nccl_communicator(self._comm) if over_nccl else None

    def clear(self) -> None:
        """Begin to add up."""
        self.payload.fill(0)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        self.payload *= factor

    def put(self, position: int, gradient: Any, factor: float | None) -> None:
        """See ``HostBuffer.put``."""
        leaf, view = self._leaves[position], self.views[position]
        if gradient is None:
            if factor is None:
                view.fill(0)
            return
        values = self._cp.from_dlpack(gradient) if hasattr(gradient, "__dlpack__") else self._cp.asarray(gradient)
        if values.shape != leaf.shape:
            raise InvalidArgumentError(
                f"the gradient of {leaf.path} has the shape {values.shape}, its parameter {leaf.shape}; give "
                "gradients of the parameters that distribute was given."
            )
        if factor != 0.0:
            view[...] = values if factor is None else view + values.astype(view.dtype) * factor

    def result(self, position: int) -> Any:
        """A reduced gradient as CuPy's array, in its own type; any framework takes it over by DLPack."""
        return self.views[position].astype(self._leaves[position].dtype, copy=False)

    def announce(self, own: float) -> None:
        """Nothing here needs to know before."""

    def exchange(self, own: float, factor: float) -> None:
        """See ``HostBuffer.exchange``."""
        self.payload *= own * factor / (self._mean if self._half else 1.0)
        if self._nccl is not None:
            self._over_nccl()
            return
        self._cp.cuda.get_current_stream().synchronize()  # MPI knows no streams
        if self._path == plan.CUDA_AWARE:
            self._comm.Allreduce(mpi.library().IN_PLACE, self.payload)
            return
        host = self._cp.asnumpy(self.payload)
        mpi.ranks(self._comm).run(ALLREDUCE, host, "")
        self.payload.set(host)

    def requests(self, own: float, factor: float) -> Iterator[Any]:
        """As ``exchange``: NCCL does not block the host anyway."""
        self.exchange(own, factor)
        yield from ()

    def _over_nccl(self) -> None:
        nccl, stream = self._cp.cuda.nccl, self._cp.cuda.get_current_stream()
        flat = self.payload.astype(np.float16) if self._half else self.payload
        kinds = {"e": nccl.NCCL_FLOAT16, "f": nccl.NCCL_FLOAT32, "d": nccl.NCCL_FLOAT64}
        self._nccl.allReduce(flat.data.ptr, flat.data.ptr, flat.size, kinds[flat.dtype.char], nccl.NCCL_SUM, stream.ptr)
        if self._half:
            self._cp.multiply(flat, self._mean, out=self.payload, casting="same_kind")
