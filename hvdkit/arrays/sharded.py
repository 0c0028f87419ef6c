"""Each rank updates, and keeps the optimizer's state of, its own numbers of the parameters (ZeRO stage 1).

For who keeps what, and the source, see ``hvdkit.steps.shard_state``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hvdkit.arrays import mpi, tree
from hvdkit.arrays.tree import Array, OwnState
from hvdkit.core.communicator import BROADCAST, CHUNK
from hvdkit.core.layout import in_buckets
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.shard_state import MESSAGE_BYTES, divide
from hvdkit.steps.topology import Topology


@functools.cache
def _comm() -> Any:
    """Where all of these messages travel, apart from others."""
    return mpi.duplicate(None)


class ShardedState:
    """Divides parameters among the ranks, for an optimizer's state of 1 / n of the size on each. A collective.

    Update this rank's numbers with the mean gradients' (``own``), then give them to the others (``gather``)::

        shards = hk.ShardedState(parameters, world=world)
        weights = shards.own(parameters)  # NumPy: views, which an update in place changes
        moments = [np.zeros_like(one) for one in weights]
        ...
        for weight, moment, gradient in zip(weights, moments, shards.own(reduce(gradients)), strict=True):
            moment[...] = 0.9 * moment + gradient
            weight -= lr * moment
        parameters = shards.gather(weights, out=parameters)

    Args:
        parameters: containers of arrays, of the same shapes on every rank; None where there is none.
        world: the job.
        whole: never cut a parameter, for an update that looks at more than one number of it at a time. The ranks'
            shares are then only as even as the parameters' sizes allow.
    Raises:
        InvalidArgumentError: something that is no array.
        AgreementError: the ranks' parameters differ; raised on every rank.
    """

    def __init__(self, parameters: Any, *, world: Topology, whole: bool = False) -> None:
        named = tree.flatten(parameters)
        outlines = [None if leaf is None else _outline(leaf, path) for path, leaf in named]
        self._outline = tree.rebuild(parameters, iter(outlines))
        self._paths = [path for path, _ in named]
        self._shapes = [() if one is None else one.shape for one in outlines]
        self._rank, self._size, self._whole = world.rank, world.size, whole
        sizes = [0 if one is None else one.size for one in outlines]
        self._pieces = divide(sizes, world.size, range(len(sizes)) if whole else ())
        self._own = {one.place: (one.start, one.stop) for one in self._pieces if one.owner == world.rank}
        self._key = (tuple(zip(self._paths, self._shapes, strict=True)), whole, world.rank, world.size)
        if world.size > 1:
            rows = [f"{path} {shape}" for path, shape in self._key[0]]
            mpi.require_same_rows(_comm(), [*rows, f"whole {whole} ()"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedState) and self._key == other._key

    def __hash__(self) -> int:  # JAX compares what states hold beside arrays
        return hash(self._key)

    def owned(self, place: int) -> tuple[int, int]:
        """The numbers of a parameter, by its place in the order of names, that are this rank's: start and stop."""
        return self._own.get(place, (0, 0))

    def own(self, parameters: Any) -> Any:
        """This rank's numbers of parameters, gradients or the like, in the same containers.

        Returns:
            Of each array the numbers as a flat array, empty where all are other ranks'; views of NumPy arrays in C
            order. With ``whole`` the array itself, or an empty one with as many dimensions.
        Raises:
            InvalidArgumentError: other containers or shapes than the parameters'.
        """
        leaves = tree.leaves_like(self._outline, parameters)
        return tree.rebuild(self._outline, iter([self._take(place, leaf) for place, leaf in enumerate(leaves)]))

    def _take(self, place: int, leaf: Any) -> Any:
        if leaf is None:
            return None
        array = leaf if hasattr(leaf, "reshape") else tree.to_host(leaf, self._paths[place])
        if tuple(array.shape) != self._shapes[place]:
            raise InvalidArgumentError(
                f"{self._paths[place]} has the shape {tuple(array.shape)}, the parameter {self._shapes[place]}; give "
                "an array for each parameter, of its shape."
            )
        start, stop = self.owned(place)
        if not self._whole:
            return array.reshape(-1)[start:stop]
        if stop > start:
            return array
        return array[..., :0] if array.shape else array.reshape(-1)[:0]

    def gather(self, own: Any, out: Any = None) -> Any:
        """The whole arrays, of which each rank gives its own numbers: parameters, or their updates. A collective.

        Args:
            own: what ``own`` returned, or arrays of the same sizes; of one type on all ranks.
            out: NumPy arrays of the parameters' shapes to write to, in C order. Where ``own`` holds views of them,
                nothing is copied on this rank.
        Returns:
            ``out``, or new arrays of the framework of ``own``, in the parameters' containers.
        Raises:
            InvalidArgumentError: arrays that do not fit; an AgreementError on the other ranks.
        """
        if self._size > 1:
            mpi.everyone()  # what runs behind the program comes first
        return self.exchange(own, out)

    def exchange(self, own: Any, out: Any = None) -> Any:
        """As ``gather``, for a thread that runs behind the program."""

        def prepare() -> tuple[list[Any], list[Any]]:
            parts = tree.leaves_like(self._outline, own)
            targets = [None] * len(parts) if out is None else tree.leaves_like(self._outline, out)
            return parts, [self._begin(place, *pair) for place, pair in enumerate(zip(parts, targets, strict=True))]

        if self._size == 1:
            parts, held = prepare()
        else:
            ranks = mpi.ranks(_comm())
            parts, held = ranks.together(prepare)
            pieces = [one for one in self._pieces if held[one.place] is not None]
            views = [_bytes(held[one.place], one.start, one.stop) for one in pieces]
            sizes = [len(view) for view in views]
            # A large piece travels alone, out of its own memory; small ones of one owner travel together.
            kinds = [(one.owner, size >= MESSAGE_BYTES) for one, size in zip(pieces, sizes, strict=True)]
            for places in in_buckets(kinds, sizes, MESSAGE_BYTES):
                owner, message = pieces[places[0]].owner, [views[place] for place in places]
                if len(message) == 1:
                    for start in range(0, len(message[0]), CHUNK):
                        ranks.run(BROADCAST, message[0][start : start + CHUNK], "hvdkit.gather", root=owner)
                    continue
                for view, got in zip(message, ranks.broadcast_arrays(message, owner), strict=True):
                    view[...] = got
        if out is not None:
            return out
        made = [None if whole is None else tree.maker(part)(whole) for part, whole in zip(parts, held, strict=True)]
        return tree.rebuild(self._outline, iter(made))

    def _begin(self, place: int, part: Any, target: Any) -> Array | None:
        """The array that is to be whole, with this rank's numbers."""
        if part is None:
            return None
        path, shape, (start, stop) = self._paths[place], self._shapes[place], self.owned(place)
        values = tree.to_host(part, path)
        if values.size != stop - start:
            raise InvalidArgumentError(
                f"{path} has {values.size} numbers, but {stop - start} are this rank's; give what own(...) returned."
            )
        if target is None:
            target = np.empty(shape, values.dtype)
        elif not _holds(target, shape, values.dtype):
            raise InvalidArgumentError(
                f"out has no NumPy array of shape {shape} and type {values.dtype}, in C order and writeable, for "
                f"{path}; leave out= away for new arrays."
            )
        mine = target.reshape(-1)[start:stop]
        if mine.ctypes.data != values.ctypes.data:
            mine[...] = values.reshape(-1)
        return target  # type: ignore[no-any-return]

    def state(self, **slots: Any) -> OwnState:
        """Slots that this rank keeps of its own numbers, marked for checkpoints and checks: ``state(m=m, v=v, t=t)``.

        Args:
            slots: containers as of ``own``, or numbers that are the same on all ranks.
        Returns:
            The slots, in a dict, as ``OwnState.inner``.
        Raises:
            InvalidArgumentError: containers or sizes that are not those of ``own``.
        """
        parts = []
        for name, value in slots.items():
            if np.isscalar(value) or getattr(value, "shape", None) == ():
                continue
            leaves = tree.leaves_like(self._outline, value)
            for place, ((path, _), leaf) in enumerate(zip(tree.flatten({name: value}), leaves, strict=True)):
                start, stop = self.owned(place)
                if leaf is not None and np.prod(leaf.shape, dtype=int) != stop - start:
                    raise InvalidArgumentError(
                        f"{path} has the shape {tuple(leaf.shape)}, but {stop - start} numbers are this rank's; give "
                        "arrays like those of own(...)."
                    )
                parts.append((path, self._shapes[place], start, stop))
        return OwnState(slots, self, tuple(parts))


def _outline(leaf: Any, path: str) -> Array:
    """An array of the same shape that takes no memory."""
    array = leaf if isinstance(getattr(leaf, "dtype", None), np.dtype) else tree.to_host(leaf, path)
    return np.broadcast_to(np.zeros((), np.uint8), array.shape)


def _holds(target: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    fits = isinstance(target, np.ndarray) and target.shape == shape and target.dtype == dtype
    return bool(fits and target.flags.c_contiguous and target.flags.writeable)


def _bytes(array: Array, start: int, stop: int) -> Array:
    return array.reshape(-1)[start:stop].view(np.uint8)
