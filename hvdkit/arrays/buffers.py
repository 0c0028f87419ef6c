"""Where gradients lie and travel: one contiguous buffer for all of one type, used again in every step."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.arrays import mpi, shared_memory, tree
from hvdkit.arrays.exit_watchdog import waits
from hvdkit.arrays.shared_memory import SharedSum
from hvdkit.arrays.tree import Array
from hvdkit.core.communicator import ALLGATHER, ALLREDUCE, ALLTOALL
from hvdkit.core.compression import kinds_of, new_packing
from hvdkit.core.layout import FLAGS
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.gradients import GradientOptions

_LINE = 16  # a head is filled up to whole cache lines (of float32)
CHUNK_BYTES = 1 << 20
"""A longer buffer is scaled and sent in pieces of this size, which stay in a core's cache between the two."""
SHORT_BYTES = 1 << 14
"""Gradients up to this length travel in one message with their head."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One gradient.

    Attributes:
        path: its place in the containers.
        shape, dtype: its own.
        make: what turns a NumPy array into an array of its framework.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[Array], Any]

    @property
    def size(self) -> int:
        """Its number of values."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def row(self) -> str:
        """What must be the same on every rank."""
        return f"{self.path} {self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Between whom, and how, gradients are added up.

    Attributes:
        comm: of the ranks.
        mean: what a sum of equal gradients is multiplied by: 1/size, or 1 where the sum is wanted.
        compression: how they travel; see ``GradientOptions``.
        one_host: whether all ranks share a host.
    """

    comm: Any
    mean: float
    compression: str
    one_host: bool


def views_of(payload: Any, leaves: Sequence[Leaf]) -> list[Any]:
    """Each gradient in (sum of sizes,) values, of NumPy or CuPy, in its shape."""
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    return [payload[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]


class SumBuffer:
    """Gradients of one type. A long buffer of ranks on one host lies in memory that they share.

    Args:
        leaves: the gradients.
        sent: the type in which they are added up.
        head: values at the front of the buffer that are not gradients, and travel with them when the buffer is short.
        ranks: between whom, and how.

    Attributes:
        message: the whole buffer, (head + sum of sizes,).
        head: its front, (head,).
        payload: the gradients, (sum of sizes,).
        views: each gradient in the payload, in its shape.
        kind: of compression, by which they travel where there are packings for it.
        packed: by kind, what sends them packed.
    """

    def __init__(self, leaves: Sequence[Leaf], sent: np.dtype[Any], head: int, ranks: Ranks) -> None:
        self._leaves, self._comm, self._ranks = leaves, ranks.comm, mpi.ranks(ranks.comm)
        length = head + sum(leaf.size for leaf in leaves)
        self.kind = ranks.compression
        packs = self.kind not in ("none", "auto") and sent.kind == "f"
        self._is_short = length * sent.itemsize <= SHORT_BYTES and not packs
        self._shared: SharedSum | None = None
        if self._is_short or packs or not ranks.one_host or ranks.comm.Get_size() == 1:
            self.message: Array = np.zeros(length, dtype=sent)
        else:
            self.message, self._shared = shared_memory.buffer(ranks.comm, length, head, sent)
        self.head, self.payload = self.message[:head], self.message[head:]
        self.views: list[Array] = views_of(self.payload, leaves)
        step = max(1, CHUNK_BYTES // sent.itemsize)
        chunks = [self.payload[start : start + step] for start in range(0, len(self.payload), step)]
        self._chunks = [self._ranks.repeated(ALLREDUCE, chunk) for chunk in chunks]
        kinds = [self.kind] if packs else []
        if self.kind == "auto" and sent.kind == "f" and not self._is_short:
            kinds = [kind for kind in kinds_of(bfloat16=True) if kind != "none"]
        self.packed = {kind: PackedExchange(self.payload, replace(ranks, compression=kind)) for kind in kinds}

    def in_one_message(self) -> Callable[[], object] | None:
        """What puts the sum of all ranks' messages, with their heads, into each rank's, and waits. A collective.

        Returns:
            None for a buffer that is too long to travel in one message with its head.
        """
        if not self._is_short:
            return None
        return self._ranks.repeated(ALLREDUCE, self.message).run

    def put(self, position: int, gradient: Any, factor: float | None) -> None:
        """Put a gradient, or None for zeros, into the buffer.

        Args:
            position: which one.
            gradient: it, of any framework.
            factor: None: it takes the place of what is there; else it is added to that, times the factor.
        Raises:
            InvalidArgumentError: another shape, or a type that does not fit into the buffer's.
        """
        leaf, view = self._leaves[position], self.views[position]
        if gradient is view:
            return
        if gradient is None:
            if factor is None:
                view[...] = 0
            return
        values = tree.to_host(gradient, leaf.path)
        self._require_shape(leaf, values.shape)
        if values.dtype.kind == "c" and view.dtype.kind != "c":
            raise InvalidArgumentError(f"the gradient of {leaf.path} is complex, its parameter is {leaf.dtype}.")
        if factor is None:
            view[...] = values
        elif factor == 0.0:
            return
        elif factor == 1.0:
            np.add(view, values, out=view, casting="unsafe")
        else:
            np.add(view, np.multiply(values, factor, dtype=view.dtype, casting="unsafe"), out=view)

    @staticmethod
    def _require_shape(leaf: Leaf, shape: tuple[int, ...]) -> None:
        if shape != leaf.shape:
            raise InvalidArgumentError(
                f"the gradient of {leaf.path} has the shape {shape}, its parameter {leaf.shape}; give "
                "gradients of the parameters that distribute was given."
            )

    def clear(self) -> None:
        """Begin to add up."""
        self.payload.fill(0)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        self.payload *= factor

    def result(self, position: int) -> Any:
        """A reduced gradient in its own type and framework; NumPy's are views of the buffer where the type allows."""
        leaf, view = self._leaves[position], self.views[position]
        return leaf.make(view if view.dtype == leaf.dtype else view.astype(leaf.dtype))

    def announce(self, own: float) -> None:
        """Before the heads are exchanged: what this rank's gradients will be multiplied by."""
        if self._shared is not None:
            self._shared.announce(own)

    def exchange(self, own: float, factor: float) -> None:
        """Put factor * sum over the ranks of own * gradient in place; a collective that waits.

        Args:
            own: of this rank, as announced.
            factor: of the sum, the same on every rank.
        """
        if self.kind in self.packed:
            self.packed[self.kind].exchange(own * factor)
        elif self._shared is not None:
            self._shared.add_up(factor)
            self._comm.Barrier()
        else:
            for chunk in self._chunks:
                if own * factor != 1.0:
                    np.multiply(chunk.got, own * factor, out=chunk.got)
                chunk.run()


class PackedExchange:
    """Adds up one buffer over the ranks, in place; the gradients travel packed, see ``hvdkit.core.compression``.

    Args:
        payload: (m,), float32 or float64; the gradients.
        ranks: between whom, and how. What a rank packs is near its gradient, and small ones are not lost: a mean is
            divided by the number of ranks after it.
    """

    _numbers = itertools.count()

    def __init__(self, payload: Array, ranks: Ranks) -> None:
        self._payload, self._mean = payload, ranks.mean
        among, size = mpi.ranks(ranks.comm), ranks.comm.Get_size()
        pieces = [(f"arrays.{next(self._numbers)}", len(payload))]
        saves = mpi.is_started() and size == mpi.everyone().Get_size()
        self._packing = new_packing(ranks.compression, pieces, among.rank(), size, dtype=payload.dtype, saves=saves)
        self._mine = np.empty((size, self._packing.row), np.uint8)
        self._result = np.empty((1, self._packing.row), np.uint8)
        self._deal_out, self._collect = among.repeated(ALLTOALL, self._mine), among.repeated(ALLGATHER, self._result)

    def exchange(self, factor: float) -> None:
        """Put the result into the payload; a collective that waits.

        Args:
            factor: what this rank's gradients are multiplied by in the result.
        """
        self._mine[:] = self._packing.pack(self._payload, factor / self._mean)
        self._deal_out.run()
        self._result[0] = self._packing.add_up(self._deal_out.got, self._mean)
        self._collect.run()
        self._packing.unpack(self._collect.got, self._payload)


# On CUDA GPUs: over NCCL with CuPy, not tried on a GPU yet ------------------------------------------------------------


def nccl_is_usable(comm: Any) -> bool:
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


# Which gradients there are, and in which buffers ---------------------------------------------------------------------


class Layout:
    """The gradients of one model; making it is a collective.

    Args:
        parameters: containers of arrays; None where there never is a gradient.
        options: how they are combined.
        comm: of the ranks.
    Raises:
        InvalidArgumentError: no array, or a type without a mean; an AgreementError on the other ranks.
        AgreementError: the ranks give different names, shapes, types or options; on every rank.

    Attributes:
        leaves: the gradients.
        buffers: where they travel.
        places: the buffer of each gradient, and its number in it.
        head: room for the control word, which travels with the first buffer or before it, in the host's memory.
        views: the gradients' memory in the parameters' containers; None where some is on a GPU.
        is_intact: whether ``views``, which callers have, still holds this memory and nothing else.
        gives_views: whether the results are in this memory: NumPy arrays, in the type in which they travel.
    """

    def __init__(self, parameters: Any, options: GradientOptions, comm: Any) -> None:
        given = mpi.ranks(comm).together(lambda: _read(parameters))
        self._slots = [slot for slot, leaf in enumerate(given) if leaf is not None]
        self._count = len(given)
        self._outline = tree.rebuild(parameters, iter(range(self._count)))
        self.leaves: list[Leaf] = [given[slot] for slot in self._slots]
        on_gpu = [tree.is_on_gpu(value) for _, value in tree.flatten(parameters) if value is not None]
        rows = [f"{leaf.row} on a GPU" if gpu else leaf.row for leaf, gpu in zip(self.leaves, on_gpu, strict=True)]
        mpi.require_same_rows(comm, [*rows, f"combined by {options}"])
        host = comm.Split_type(mpi.library().COMM_TYPE_SHARED)
        one_host = bool(host.Get_size() == comm.Get_size())
        host.Free()
        mean = 1.0 / comm.Get_size() if options.op == "average" else 1.0
        ranks = Ranks(comm, mean, options.compression, one_host)
        if any(on_gpu) and not nccl_is_usable(comm):
            on_gpu = [False] * len(on_gpu)  # through the host, where their framework copies them
        alike: dict[tuple[bool, np.dtype[Any]], list[int]] = {}
        for position, (leaf, gpu) in enumerate(zip(self.leaves, on_gpu, strict=True)):
            alike.setdefault((gpu, sent_as(leaf.dtype, leaf.path)), []).append(position)
        length = -(-(FLAGS + len(self.leaves)) // _LINE) * _LINE
        self.buffers: list[SumBuffer] = []
        self.places: list[tuple[SumBuffer, int]] = [None] * len(self.leaves)  # type: ignore[list-item]
        for (gpu, sent), positions in alike.items():
            leaves = [self.leaves[position] for position in positions]
            if gpu:
                self.buffers.append(NcclBuffer(leaves, sent, ranks))
            else:
                self.buffers.append(SumBuffer(leaves, sent, 0 if self.buffers else length, ranks))
            for number, position in enumerate(positions):
                self.places[position] = (self.buffers[-1], number)
        self.head = np.zeros(length) if on_gpu[0] else self.buffers[0].head
        views = [buffer.views[number] for buffer, number in self.places]
        self.views = None if any(on_gpu) else self.in_containers(views)
        self.is_intact = tree.watcher(self.views)
        self.gives_views = self.views is not None and all(
            leaf.make is tree.as_it_is and leaf.dtype == view.dtype
            for leaf, view in zip(self.leaves, views, strict=True)
        )

    def gradients(self, given: Any) -> list[Any]:
        """The gradients in containers, None for those that it does not have.

        Raises:
            InvalidArgumentError: other containers, or a gradient where distribute was given None.
        """
        found = tree.leaves_like(self._outline, given)
        if len(self._slots) == self._count:
            return found
        gradients = [found[slot] for slot in self._slots]
        if sum(one is not None for one in found) > sum(one is not None for one in gradients):
            raise InvalidArgumentError(
                "there is a gradient where distribute was given None; give distribute that parameter, too."
            )
        return gradients

    def in_containers(self, values: Sequence[Any]) -> Any:
        """One value for each gradient, in the parameters' containers."""
        leaves: list[Any] = [None] * self._count
        for slot, value in zip(self._slots, values, strict=True):
            leaves[slot] = value
        return tree.rebuild(self._outline, iter(leaves))


def sent_as(dtype: np.dtype[Any], where: str) -> np.dtype[Any]:
    """The type in which a gradient travels and is added up.

    Half and lower precisions are added up in float32: their own sums lose what the ranks differ by, and MPI has none.

    Raises:
        InvalidArgumentError: integers, and whatever else has no mean.
    """
    if dtype.itemsize <= 2 and (dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))):
        return np.dtype(np.float32)
    if dtype.kind in "fc":
        return dtype.newbyteorder("=")
    raise InvalidArgumentError(
        f"{where} is of type {dtype}, which has no mean; leave it out, or put None in its place (gradients are real or "
        "complex numbers)."
    )


def _read(parameters: Any) -> list[Leaf | None]:
    """Each leaf of the parameters, None where there is no array."""
    leaves: list[Leaf | None] = []
    for path, value in tree.flatten(parameters):
        if value is None:
            leaves.append(None)
            continue
        host = tree.to_host(value, path)
        sent_as(host.dtype, path)
        leaves.append(Leaf(path, host.shape, host.dtype, tree.maker(value)))
    if not any(leaves):
        raise InvalidArgumentError(
            "there is no array among the parameters; give distribute the arrays that are trained."
        )
    return leaves
