"""One contiguous buffer for all gradients of one type, used again in every step; the inside of ``hvdkit.arrays``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.arrays import mpi, shared_memory, tree
from hvdkit.arrays.shared_memory import SharedSum
from hvdkit.core.communicator import ALLGATHER, ALLREDUCE, ALLTOALL
from hvdkit.core.compression import kinds_of, new_packing
from hvdkit.errors import InvalidArgumentError

Array = npt.NDArray[Any]
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
