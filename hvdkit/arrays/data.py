"""This rank's part of arrays of samples: the inside of ``hvdkit.arrays.shard``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.arrays import tree
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.shards import Batch, InEpochs, Position, Shard, require_loader

Array = npt.NDArray[Any]


def arrays_of(data: Any) -> tuple[Array, ...]:
    """The arrays of a data set, each with one row for each sample; memory that NumPy reads is not copied.

    Raises:
        InvalidArgumentError: no array, or arrays of different lengths.
    """
    given = data if isinstance(data, (tuple, list)) else (data,)
    arrays = tuple(tree.to_host(one, f"array {number} of the data set") for number, one in enumerate(given))
    lengths = [len(array) if array.ndim else None for array in arrays]
    if not arrays or None in lengths or len(set(lengths)) != 1:
        raise InvalidArgumentError(
            "shard needs an array, or a tuple of arrays, with one row for each sample, got lengths "
            f"{', '.join(map(str, lengths)) or 'none'}; give (x, y) with as many x as y."
        )
    return arrays


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
        return begun.counting(self._batches(begun.start))

    def evaluation(self) -> Iterator[tuple[Array, ...]]:
        """This rank's batches of an evaluation: each sample once on all ranks together, in the data set's order.

        Batches are as in training, with "exact" of weight 1, and dealt out one by one; a rank may have one less than
        another. No position moves.
        """
        return (self._rows(Batch(indices, 1.0)) for indices in self.share.once())

    def _batches(self, start: Position) -> Iterator[tuple[Array, ...]]:
        return (self._rows(batch) for batch in self.share.batches(start.epoch, start.samples))

    def _rows(self, batch: Batch) -> tuple[Array, ...]:
        rows = tuple(array[batch.indices] for array in self._arrays)
        if self.share.remainder == "exact":
            rows += (np.full(len(batch.indices), batch.weight),)
        return rows


require_sharded = functools.partial(require_loader, kinds=(ShardedArrays,))
