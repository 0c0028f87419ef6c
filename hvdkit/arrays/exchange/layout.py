"""Which gradients there are, and in which buffers they travel; the inside of ``hvdkit.arrays.distribute``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.arrays import mpi
from hvdkit.arrays import tree as arrays_tree
from hvdkit.arrays.exchange import plan, shared
from hvdkit.arrays.exchange.buffers import HostBuffer, Leaf, Ranks
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
        progress: "thread" or "calls", which do not understand each other.
    Raises:
        InvalidArgumentError: no array, or a type without a mean; an AgreementError on the other ranks.
        AgreementError: the ranks give different names, shapes, types or options; on every rank.

    Attributes:
        leaves: the gradients.
        buffers: where they travel.
        places: the buffer of each gradient, and its number in it.
        head: the values that travel with the first buffer or before it, in the host's memory.
        views: the gradients' memory in the parameters' containers; None where some is on a GPU.
        is_array: whether there are no containers, but one array.
        is_intact: whether ``views``, which callers have, still holds this memory and nothing else.
        gives_views: whether the results are in this memory: NumPy arrays, in the type in which they travel.
        results: new containers around this memory, where ``gives_views``.
    """

    def __init__(self, parameters: Any, options: GradientOptions, comm: Any, head: int, progress: str) -> None:
        given, keys = mpi.ranks(comm).together(lambda: _read(parameters))
        self._slots = [slot for slot, leaf in enumerate(given) if leaf is not None]
        self._count = len(given)
        self._outline = arrays_tree.rebuild(parameters, iter(range(self._count)))
        self._read = arrays_tree.reader(self._outline)
        self.leaves: list[Leaf] = [given[slot] for slot in self._slots]
        rows = [f"{leaf.row} ({device})" for leaf, (device, _) in zip(self.leaves, keys, strict=True)]
        mpi.require_same_rows(comm, [*rows, f"combined by {options}, progress={progress!r}"])
        paths = {device: _path_of(device, comm) for device in dict(keys)}
        keys = [(paths[device], sent) for device, sent in keys]
        one_host = shared.on_one_host(comm, mpi.library().COMM_TYPE_SHARED)
        mean = 1.0 / comm.Get_size() if options.op == "average" else 1.0
        ranks = Ranks(comm, mean, options.compression, one_host)
        length = -(-(head + len(self.leaves)) // _LINE) * _LINE
        self.buffers: list[Any] = []
        self.places: list[tuple[Any, int]] = [(None, 0)] * len(self.leaves)
        for (path, sent), positions in plan.groups(keys).items():
            leaves = [self.leaves[position] for position in positions]
            own_head = 0 if self.buffers else length
            self.buffers.append(_buffer(path, leaves, sent, own_head, ranks))
            for number, position in enumerate(positions):
                self.places[position] = (self.buffers[-1], number)
        self.head = self.buffers[0].head if isinstance(self.buffers[0], HostBuffer) else np.zeros(length)
        on_the_host = all(isinstance(buffer, HostBuffer) for buffer in self.buffers)
        views = [buffer.views[number] for buffer, number in self.places] if on_the_host else []
        self.views: Any = self.in_containers(views) if on_the_host else None
        self.is_array = isinstance(self._outline, int)
        self.is_intact = arrays_tree.watcher(self.views)
        self.gives_views = on_the_host and all(
            leaf.make is arrays_tree.as_it_is and leaf.dtype == view.dtype
            for leaf, view in zip(self.leaves, views, strict=True)
        )
        self.results = arrays_tree.copier(self.in_containers(views) if self.gives_views else None)

    def gradients(self, tree: Any) -> list[Any]:
        """The gradients in a tree, None for those that it does not have.

        Raises:
            InvalidArgumentError: other containers, or a gradient where distribute was given None.
        """
        found = self._read(tree)
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


def _read(parameters: Any) -> tuple[list[Leaf | None], list[tuple[str, np.dtype[Any]]]]:
    """Each leaf of the parameters, None where there is no array; of each array its device and the type that travels."""
    leaves: list[Leaf | None] = []
    keys: list[tuple[str, np.dtype[Any]]] = []
    for path, value in arrays_tree.flatten(parameters):
        if value is None:
            leaves.append(None)
            continue
        device = arrays_tree.device_of(value)
        if device == "host":
            host = arrays_tree.to_host(value, path)
            leaf = Leaf(path, host.shape, host.dtype, arrays_tree.maker(value))
        else:
            leaf = Leaf(path, tuple(value.shape), np.dtype(value.dtype), arrays_tree.as_it_is)
        leaves.append(leaf)
        keys.append((device, plan.sent_as(leaf.dtype, path)))
    if not keys:
        raise InvalidArgumentError(
            "there is no array among the parameters; give distribute the arrays that are trained."
        )
    return leaves, keys


def _path_of(device: str, comm: Any) -> str:
    if device != "cuda":
        return plan.path(device, plan.Machine())
    from hvdkit.arrays.exchange import cuda

    return plan.path(device, cuda.machine(comm))


def _buffer(path: str, leaves: Sequence[Leaf], sent: np.dtype[Any], head: int, ranks: Ranks) -> Any:
    if path == plan.HOST:
        return HostBuffer(leaves, sent, head, ranks)
    from hvdkit.arrays.exchange import cuda

    return cuda.CudaBuffer(leaves, sent, path, ranks)
