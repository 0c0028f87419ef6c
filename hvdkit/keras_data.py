"""A rank's part of a data set for Keras' ``fit``, on every backend; the inside of ``hvdkit.keras.shard``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.shards import Batch, Shard


def as_arrays(dataset: Any) -> tuple[Any, ...]:
    """``(x, y)`` and the like, checked; each part an array or a structure of arrays.

    Raises:
        InvalidArgumentError: not a tuple of arrays, or arrays of several lengths.
    """
    parts = tuple(dataset) if isinstance(dataset, (tuple, list)) else ()
    leaves = keras.tree.flatten(parts)
    if len(parts) not in (2, 3) or not all(getattr(leaf, "shape", ()) for leaf in leaves):
        raise InvalidArgumentError(
            f"shard needs NumPy arrays as (x, y) or (x, y, sample_weight), got {type(dataset).__name__}; give lists as "
            "np.asarray(...), and shard a tf.data.Dataset with hvdkit.tensorflow."
        )
    lengths = sorted({len(leaf) for leaf in leaves})
    if len(lengths) != 1:
        raise InvalidArgumentError(f"the arrays must have one length, got {', '.join(map(str, lengths))}.")
    return parts


class ShardedData(keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's part of every global batch; a new order in each pass. Made by ``hvdkit.keras.shard``.

    A ``keras.utils.PyDataset`` for ``fit`` and ``evaluate``, and an iterable of batches for loops of your own.
    """

    def __init__(self, arrays: tuple[Any, ...], share: Shard) -> None:
        super().__init__(workers=1, use_multiprocessing=False)  # passes are told apart by reads that come in order
        self.share = share
        self.epoch = 0
        self._arrays = arrays
        self._plan: list[Batch] = []
        self._training = False
        self._next = 0

    def __len__(self) -> int:
        return len(self.share)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass ``epoch``: needed only to resume, or to repeat an order.

        Raises:
            InvalidArgumentError: not an integer >= 0.
        """
        if not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgumentError(f"epoch must be an integer >= 0, got {epoch!r}.")
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Batch ``index`` of the pass that Keras is in; outside of one, of the next pass.

        Keras also looks at the first batches before it trains, and TensorFlow reads ahead in a thread of its own: a
        pass is what begins with batch 0 between Keras' begin and end of an epoch, and it keeps its order to the end.

        Raises:
            InvalidArgumentError: Keras shuffles the batches by itself, on each rank differently.
        """
        if index == 0 or not self._plan:
            self._plan = list(self.share.batches(self.epoch))
            if self._training:
                self.epoch += 1
        if self._training and index not in (0, self._next):
            raise InvalidArgumentError(
                f"batch {index} was read where batch {self._next} was due: fit shuffles the batches, and the ranks' "
                "would no longer belong together; call hvdkit.keras.init() before fit, or fit(shuffle=False)."
            )
        self._next = index + 1
        return self._contents(self._plan[index])

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        batches = self.share.batches(self.epoch)
        self.epoch += 1
        return map(self._contents, batches)

    def on_epoch_begin(self) -> None:
        """Called by Keras."""
        self._training = True

    def on_epoch_end(self) -> None:
        """Called by Keras."""
        self._training = False

    def _contents(self, batch: Batch) -> tuple[Any, ...]:
        parts = keras.tree.map_structure(lambda array: array[batch.indices], self._arrays)
        if self.share.remainder != "exact":
            return tuple(parts)
        weights = np.full(len(batch.indices), batch.weight, dtype=keras.config.floatx())
        if len(parts) == 3:
            own = np.asarray(parts[2])
            weights = own * weights.reshape(-1, *(1 for _ in own.shape[1:]))
        return (*parts[:2], weights)
