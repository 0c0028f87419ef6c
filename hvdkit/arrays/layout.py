"""Which gradients there are, and in which buffers they travel; the inside of ``hvdkit.arrays.distribute``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.arrays import mpi, nccl, shared_memory
from hvdkit.arrays import tree as arrays_tree
from hvdkit.arrays.sum_buffer import Leaf, Ranks, SumBuffer
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.gradients import GradientOptions

_LINE = 16  # the head is filled up to whole cache lines (of float32)


class Layout:
    """The gradients of one model; making it is a collective.

    Args:
        parameters: containers of arrays; None where there never is a gradient.
        options: how they are combined.
        comm: of the ranks.
        head: values that travel with the gradients, besides one for each of them.
    Raises:
        InvalidArgumentError: no array, or a type without a mean; an AgreementError on the other ranks.
        AgreementError: the ranks give different names, shapes, types or options; on every rank.

    Attributes:
        leaves: the gradients.
        buffers: where they travel.
        places: the buffer of each gradient, and its number in it.
        head: the values that travel with the first buffer or before it, in the host's memory.
        views: the gradients' memory in the parameters' containers; None where some is on a GPU.
        is_intact: whether ``views``, which callers have, still holds this memory and nothing else.
        gives_views: whether the results are in this memory: NumPy arrays, in the type in which they travel.
    """

    def __init__(self, parameters: Any, options: GradientOptions, comm: Any, head: int) -> None:
        given = mpi.ranks(comm).together(lambda: _read(parameters))
        self._slots = [slot for slot, leaf in enumerate(given) if leaf is not None]
        self._count = len(given)
        self._outline = arrays_tree.rebuild(parameters, iter(range(self._count)))
        self.leaves: list[Leaf] = [given[slot] for slot in self._slots]
        on_gpu = [arrays_tree.is_on_gpu(value) for _, value in arrays_tree.flatten(parameters) if value is not None]
        rows = [f"{leaf.row} on a GPU" if gpu else leaf.row for leaf, gpu in zip(self.leaves, on_gpu, strict=True)]
        mpi.require_same_rows(comm, [*rows, f"combined by {options}"])
        one_host = shared_memory.on_one_host(comm, mpi.library().COMM_TYPE_SHARED)
        mean = 1.0 / comm.Get_size() if options.op == "average" else 1.0
        ranks = Ranks(comm, mean, options.compression, one_host)
        if any(on_gpu) and not nccl.is_usable(comm):
            on_gpu = [False] * len(on_gpu)  # through the host, where their framework copies them
        alike: dict[tuple[bool, np.dtype[Any]], list[int]] = {}
        for position, (leaf, gpu) in enumerate(zip(self.leaves, on_gpu, strict=True)):
            alike.setdefault((gpu, sent_as(leaf.dtype, leaf.path)), []).append(position)
        length = -(-(head + len(self.leaves)) // _LINE) * _LINE
        self.buffers: list[SumBuffer] = []
        self.places: list[tuple[SumBuffer, int]] = [None] * len(self.leaves)  # type: ignore[list-item]
        for (gpu, sent), positions in alike.items():
            leaves = [self.leaves[position] for position in positions]
            if gpu:
                self.buffers.append(nccl.NcclBuffer(leaves, sent, ranks))
            else:
                self.buffers.append(SumBuffer(leaves, sent, 0 if self.buffers else length, ranks))
            for number, position in enumerate(positions):
                self.places[position] = (self.buffers[-1], number)
        self.head = np.zeros(length) if on_gpu[0] else self.buffers[0].head
        views = [buffer.views[number] for buffer, number in self.places]
        self.views = None if any(on_gpu) else self.in_containers(views)
        self.is_intact = arrays_tree.watcher(self.views)
        self.gives_views = self.views is not None and all(
            leaf.make is arrays_tree.as_it_is and leaf.dtype == view.dtype
            for leaf, view in zip(self.leaves, views, strict=True)
        )

    def gradients(self, tree: Any) -> list[Any]:
        """The gradients in a tree, None for those that it does not have.

        Raises:
            InvalidArgumentError: other containers, or a gradient where distribute was given None.
        """
        found = arrays_tree.leaves_like(self._outline, tree)
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
        return arrays_tree.rebuild(self._outline, iter(leaves))


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
    for path, value in arrays_tree.flatten(parameters):
        if value is None:
            leaves.append(None)
            continue
        host = arrays_tree.to_host(value, path)
        sent_as(host.dtype, path)
        leaves.append(Leaf(path, host.shape, host.dtype, arrays_tree.maker(value)))
    if not any(leaves):
        raise InvalidArgumentError(
            "there is no array among the parameters; give distribute the arrays that are trained."
        )
    return leaves
