"""A rank's part of a data set for Keras' ``fit``, on every backend; the inside of ``hvdkit.keras.shard``."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from hvdkit.errors import InvalidArgumentError
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps.shards import Batch, InEpochs, Position, Shard
from hvdkit.steps.streams import StreamInEpochs


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


class ShardedData(InEpochs, keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's part of every global batch; a new order in each pass. Made by ``hvdkit.keras.shard``.

    A ``keras.utils.PyDataset`` for ``fit`` and ``evaluate``, and an iterable of batches for loops of your own.

    Attributes:
        share: which samples are this rank's.
        position: how far the training has come in its data, all ranks together.
    """

    def __init__(self, arrays: tuple[Any, ...], share: Shard) -> None:
        super().__init__(workers=1, use_multiprocessing=False)  # passes are told apart by reads that come in order
        self._begin(share)
        self._arrays = arrays
        self._plan: list[Batch] = []
        self._training = False
        self._read = 0

    def __len__(self) -> int:
        return len(self.share)

    @property
    def num_batches(self) -> int:
        """What Keras reads in the pass that begins; outside of one, and for its progress line, a whole epoch."""
        return self.share.steps_left(self._next.samples) if self._training else len(self)

    @property
    def steps_done(self) -> int:
        """Steps of the next pass that were taken before this process went on in mid-epoch."""
        return len(self) - self.share.steps_left(self._next.samples)

    @property
    def ends_with_filler(self) -> bool:
        """Whether this rank has no sample of its own in the last step of the pass that is under way."""
        share = self.share
        left = (share.n_samples - self.position.samples) % share.global_batch
        return share.remainder == "exact" and 0 < left <= share.world.rank

    def fills(self, batch: int) -> bool:
        """Whether this rank has no sample of its own in a batch of the epoch."""
        return self.ends_with_filler and batch == len(self) - 1

    def advance(self, steps: int) -> None:
        """Count steps that were trained in the pass that is under way."""
        for _ in range(steps):
            self.position = self.position.after(self.share, 1)
            under_way = self.position.samples > 0
            self._next = Position(self.position.epoch + under_way)

    def reader(self) -> ShardedData:
        """A copy for one ``fit``, which may look at batches and read ahead without moving the position."""
        return copy.copy(self)

    def go_to(self, other: ShardedData) -> None:
        """Begin the next pass where ``other`` begins its."""
        self.share, self.position, self._next = other.share, other._next, other._next
        other.position = other._next

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Batch ``index`` of the pass that Keras is in; outside of one, of the next pass.

        Keras also looks at the first batches before it trains, and TensorFlow reads ahead in a thread of its own: a
        pass is what begins with batch 0 between Keras' begin and end of an epoch, and it keeps its order to the end.

        Raises:
            InvalidArgumentError: Keras shuffles the batches by itself, on each rank differently.
        """
        if index == 0 or not self._plan:
            self._plan = list(self.share.batches(self._next.epoch, self._next.samples))
            if self._training:
                self._next = Position(self._next.epoch + 1)
        if self._training and index not in (0, self._read):
            raise InvalidArgumentError(
                f"batch {index} was read where batch {self._read} was due: fit shuffles the batches, and the ranks' "
                "would no longer belong together; call hvdkit.keras.init() before fit, or fit(shuffle=False)."
            )
        self._read = index + 1
        # To know the batches' types Keras looks at two, and of an epoch there may be one left.
        return self._contents(self._plan[min(index, len(self._plan) - 1)])

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        start = self.position = self._next
        self._next = Position(start.epoch + 1)
        return self._counted(start)

    def _counted(self, start: Position) -> Iterator[tuple[Any, ...]]:
        for taken, batch in enumerate(self.share.batches(start.epoch, start.samples), start=1):
            self.position = start.after(self.share, taken)
            yield self._contents(batch)

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


def is_tf_data(dataset: Any) -> bool:
    """Whether it is a ``tf.data.Dataset``; TensorFlow is not imported for it."""
    return "tensorflow" in sys.modules and isinstance(dataset, sys.modules["tensorflow"].data.Dataset)


def streams() -> Any:
    """``hvdkit.tensorflow.streams``.

    Raises:
        InvalidArgumentError: another backend than tensorflow, whose Horovod does not survive a second one's import.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise InvalidArgumentError(
            f"a tf.data.Dataset can be sharded on Keras' tensorflow backend, this process uses {backend}; set "
            "KERAS_BACKEND=tensorflow, or give arrays."
        )
    return importlib.import_module("hvdkit.tensorflow.streams")


def arrays_or_stream(dataset: Any, world: Any, **options: Any) -> tuple[Any, Any]:
    """As of ``hvdkit.tensorflow.streams``, with Keras' weights."""
    return streams().arrays_or_stream(dataset, world, TRANSPORT, with_weights, **options)  # type: ignore[no-any-return]


def with_weights(parts: Any, weights: Any) -> Any:
    """A stream's batch as ``(x, y, w)``, with what its samples counted anyway; ``(x, None, w)`` without y."""
    tf = sys.modules["tensorflow"]
    weights = tf.cast(weights, keras.config.floatx())
    if not isinstance(parts, tuple) or len(parts) < 2:
        return parts, None, weights
    if len(parts) > 2:
        own = tf.cast(parts[2], weights.dtype)
        weights = own * tf.reshape(weights, [-1] + [1] * (len(own.shape) - 1))
    return (*parts[:2], weights)


SHARDED = (ShardedData, StreamInEpochs)
"""What ``shard`` returns: of arrays, and of a ``tf.data.Dataset``."""

_TRAINED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def set_trained_on(model: Any, data: Any) -> None:
    """Note what the ``fit`` that begins trains on, for its callbacks, which Keras does not tell."""
    _TRAINED.pop(model, None)
    if data is not None:
        _TRAINED[model] = data


def trained_on(model: Any) -> Any:
    """What the model's ``fit`` trains on, where that is from ``shard``."""
    return _TRAINED.get(model)


def require_sharded(loader: Any) -> Any:
    """The data of ``shard``.

    Raises:
        InvalidArgumentError: something else.
    """
    if not isinstance(loader, SHARDED):
        raise InvalidArgumentError(f"loader must be what shard returned, got {type(loader).__name__}.")
    return loader
