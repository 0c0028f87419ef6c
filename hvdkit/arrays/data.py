"""This rank's part of arrays of samples (step 7)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdkit.arrays import mpi, tree
from hvdkit.arrays.tree import Array
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.same_data import require_same_data
from hvdkit.steps.shards import Batch, InEpochs, Shard, require_loader
from hvdkit.steps.topology import Topology


def shard(
    data: Any,
    world: Topology,
    batch_size: int,
    *,
    remainder: str = "drop",
    shuffle: bool = True,
    seed: int = 0,
) -> ShardedArrays:
    """This rank's batches of arrays of samples (step 7): ``for x, y in shard((x, y), world, 64)``.

    Args:
        data: an array, or a tuple of arrays, with one row for each sample, the same on every rank; ``np.memmap`` stays
            on disk. Batches are tuples of NumPy arrays.
        world: the job; rank and size are used.
        batch_size: samples per step on one rank.
        remainder: what becomes of an epoch's last partial batch, see ``Shard``: "drop", "pad", or "exact", with which
            each batch has the samples' weights w, float64 (m,), as its last array: the mean of w * loss on each rank
            averages to the mean over the global batch.
        shuffle: draw a new order each epoch, without any call; ``set_epoch`` exists to resume.
        seed: of the order, the same on every rank.
    Raises:
        InvalidArgumentError: arrays of different lengths, or bad numbers.
        AgreementError: the ranks' arrays differ; raised on every rank. (All call it, as a collective.)
    """
    given = data if isinstance(data, (tuple, list)) else (data,)
    arrays = tuple(tree.to_host(one, f"array {number} of the data set") for number, one in enumerate(given))
    lengths = [len(array) if array.ndim else None for array in arrays]
    if not arrays or None in lengths or len(set(lengths)) != 1:
        raise InvalidArgumentError(
            "shard needs an array, or a tuple of arrays, with one row for each sample, got lengths "
            f"{', '.join(map(str, lengths)) or 'none'}; give (x, y) with as many x as y."
        )
    if world.size > 1:
        require_same_data(mpi.ranks(), world, arrays)
    return ShardedArrays(arrays, Shard(len(arrays[0]), world, batch_size, remainder, shuffle, seed))


class ShardedArrays(InEpochs):
    """This rank's part of every global batch; a new order in each epoch. Made by ``hvdkit.arrays.shard``.

    A batch is a tuple of NumPy arrays, copies of the samples' rows.

    Attributes:
        share: which samples are this rank's.
    """

    def __init__(self, arrays: Sequence[Array], share: Shard) -> None:
        self._arrays = arrays
        self._begin(share)

    def __len__(self) -> int:
        return len(self.share)

    def __iter__(self) -> Iterator[tuple[Array, ...]]:
        begun = self._passes.begin(self._next, self.share)
        batches = self.share.batches(begun.start.epoch, begun.start.samples)
        return begun.counting(self._rows(batch) for batch in batches)

    def evaluation(self) -> Iterator[tuple[Array, ...]]:
        """This rank's batches of an evaluation: each sample once on all ranks together, in the data set's order.

        Batches are as in training, with "exact" of weight 1, and dealt out one by one; a rank may have one less than
        another. No position moves.
        """
        return (self._rows(Batch(indices, 1.0)) for indices in self.share.once())

    def _rows(self, batch: Batch) -> tuple[Array, ...]:
        rows = tuple(array[batch.indices] for array in self._arrays)
        if self.share.remainder == "exact":
            rows += (np.full(len(batch.indices), batch.weight),)
        return rows


require_sharded = functools.partial(require_loader, kinds=(ShardedArrays,))
