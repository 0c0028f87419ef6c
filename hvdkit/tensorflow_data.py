"""A rank's part of a data set as ``tf.data``; the inside of ``hvdkit.tensorflow.shard``.

Why beside ``tensorflow_state.py``: input and state have nothing in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.shards import Batch, Shard


def in_memory(dataset: Any) -> Any:
    """The samples as arrays with a common first axis, in the structure of the data set.

    Raises:
        InvalidArgumentError: neither arrays of one length nor a finite ``tf.data.Dataset`` of samples of one shape.
    """
    if isinstance(dataset, tf.data.Dataset):
        return _read(dataset)
    arrays = tf.nest.map_structure(_array, tuple(dataset) if isinstance(dataset, list) else dataset)
    lengths = {len(array) for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1:
        raise InvalidArgumentError(f"the arrays must have one length, got {', '.join(map(str, sorted(lengths)))}.")
    return arrays


def _array(value: Any) -> Any:
    if not getattr(value, "shape", ()):
        raise InvalidArgumentError(
            f"shard needs NumPy arrays such as (x, y), or a tf.data.Dataset, got {type(value).__name__}; "
            "give lists as np.asarray(...)."
        )
    return np.asarray(value)


def _read(dataset: tf.data.Dataset) -> Any:
    samples = int(dataset.cardinality())
    if samples < 1:
        raise InvalidArgumentError(
            f"shard needs a data set with a known number of samples, got one of "
            f"{'unknown' if samples == tf.data.UNKNOWN_CARDINALITY else 'infinite' if samples < 0 else 'no'} length; "
            "say it with tf.data.experimental.assert_cardinality, leave .repeat() out, or give arrays."
        )
    if not all(isinstance(part, tf.TensorSpec) for part in tf.nest.flatten(dataset.element_spec)):
        raise InvalidArgumentError("shard needs samples of dense tensors; make ragged and sparse ones dense first.")
    elements = list(dataset.as_numpy_iterator())
    try:
        return tf.nest.map_structure(lambda *parts: np.stack(parts), *elements)
    except ValueError as error:
        raise InvalidArgumentError(f"the samples must have one shape ({error}); pad them, or .unbatch().") from error


class Epochs:
    """The batches of one epoch after the other, for ``tf.data.Dataset.from_generator``."""

    def __init__(self, arrays: Any, share: Shard) -> None:
        self.share = share
        self.epoch = 0
        self._arrays = arrays
        floating = [array.dtype for array in tf.nest.flatten(arrays) if np.issubdtype(array.dtype, np.floating)]
        self._weight_type = np.float64 if floating[:1] == [np.float64] else np.float32

    def signature(self) -> Any:
        """The type of a batch, in TensorFlow's terms."""
        parts = tf.nest.map_structure(
            lambda array: tf.TensorSpec((None, *array.shape[1:]), tf.as_dtype(array.dtype)), self._arrays
        )
        return self._with_weights(parts, tf.TensorSpec((None,), self._weight_type))

    def __call__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return map(self._contents, self.share.batches(epoch))

    def _contents(self, batch: Batch) -> Any:
        parts = tf.nest.map_structure(lambda array: array[batch.indices], self._arrays)
        return self._with_weights(parts, np.full(len(batch.indices), batch.weight, dtype=self._weight_type))

    def _with_weights(self, parts: Any, weights: Any) -> Any:
        if self.share.remainder != "exact":
            return parts
        return (*parts, weights) if isinstance(parts, tuple) else (parts, weights)


class ShardedDataset(tf.data.Dataset):  # type: ignore[misc]
    """This rank's part of every global batch; a new order in each iteration. Made by ``hvdkit.tensorflow.shard``.

    A ``tf.data.Dataset``: it can be iterated eagerly and inside ``tf.function``, given to ``model.fit`` and mapped.
    """

    def __init__(self, arrays: Any, share: Shard) -> None:
        self._epochs = Epochs(arrays, share)
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        self._pipeline = (
            tf.data.Dataset.from_generator(self._epochs, output_signature=self._epochs.signature())
            .apply(tf.data.experimental.assert_cardinality(len(share)))
            .prefetch(tf.data.AUTOTUNE)
            .with_options(options)
        )
        super().__init__(self._pipeline._variant_tensor)

    def _inputs(self) -> list[Any]:
        return [self._pipeline]

    @property
    def element_spec(self) -> Any:
        """The type of a batch."""
        return self._pipeline.element_spec

    def __len__(self) -> int:
        return len(self._epochs.share)

    @property
    def n_samples(self) -> int:
        """Samples in the whole data set, before sharding."""
        return self._epochs.share.n_samples

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be; each iteration advances it by one when it begins."""
        return self._epochs.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration ``epoch``: needed only to resume, or to repeat an order."""
        if not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgumentError(f"epoch must be an integer >= 0, got {epoch!r}.")
        self._epochs.epoch = epoch
