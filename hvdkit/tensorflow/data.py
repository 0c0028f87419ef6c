"""A rank's part of a data set as ``tf.data``; the inside of ``hvdkit.tensorflow.shard``.

Batches of arrays are made by ``tf.data`` itself: Python draws an epoch's order, TensorFlow copies the rows. A batch
made in Python is written to fresh memory and copied once more, which costs large rows most of tf.data's rate.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.passes import Pass
from hvdkit.steps.shards import Batch, InEpochs, Position, Shard, require_loader
from hvdkit.tensorflow import private
from hvdkit.tf_shared.tf_data import CountedIterator, Flattened, MappedByTwo, traced, untuned

LARGE, SMALL = 16 * 1024, 256 * 2**20
"""TensorFlow gets a copy of an array whose rows have so many bytes and more, or that as a whole has no more than these.

Python hands over rows at half of TensorFlow's rate, and waits with the training thread for the interpreter's lock.
"""


def batches_of(
    arrays: Any, epoch: Callable[[], Iterable[Batch]], pack: Callable[[Any, tf.Tensor, tf.Tensor], Any]
) -> tf.data.Dataset:
    """The batches of an epoch, in order, read ahead; another epoch in each iteration.

    Args:
        arrays: NumPy arrays and ragged tensors with a common first axis, in any structure of tuples and dicts.
        epoch: called when an iteration begins.
        pack: makes a batch of its rows, in the structure of ``arrays``, its weight (float64 scalar) and its indices.
    """
    flat = [within_tensorflow(array) for array in tf.nest.flatten(arrays)]
    outside = [array for array in flat if isinstance(array, np.ndarray)]

    def contents(indices: tf.Tensor, length: tf.Tensor, weight: tf.Tensor) -> Any:
        indices = indices[:length]
        found: Iterator[Any] = iter(())
        if outside:
            types = [array.dtype for array in outside]
            found = iter(tf.numpy_function(lambda chosen: [array[chosen] for array in outside], [indices], types))
        rows = []
        for array in flat:
            rows.append(next(found) if isinstance(array, np.ndarray) else tf.gather(array, indices))
            if isinstance(array, np.ndarray):
                rows[-1].set_shape((None, *array.shape[1:]))
        return pack(tf.nest.pack_sequence_as(arrays, rows), weight, indices)

    def plan(_: tf.Tensor) -> tf.data.Dataset:
        made = tf.numpy_function(lambda: _plan(epoch()), [], [tf.int64, tf.int64, tf.float64])
        for one, rank in zip(made, (2, 1, 1), strict=True):
            one.set_shape((None,) * rank)
        return tf.data.Dataset.from_tensor_slices(tuple(made))

    # from_generator takes as long to begin as ten batches of images.
    epochs = tf.data.Dataset.range(1)
    steps = Flattened(epochs, traced(plan, epochs.element_spec))
    return MappedByTwo(steps, traced(contents, steps.element_spec)).prefetch(tf.data.AUTOTUNE)


def within_tensorflow(array: Any) -> Any:
    """A tensor where TensorFlow reads the rows, else the array; what is mapped from a file stays there."""
    if not isinstance(array, np.ndarray):
        return array
    text = array.dtype.kind in "OSU"
    worth = array.dtype.itemsize * math.prod(array.shape[1:]) >= LARGE or array.nbytes <= SMALL
    if not text and (not worth or isinstance(array, np.memmap)):
        return array
    with tf.device("CPU:0"):
        return tf.constant(array)


def _plan(epoch: Iterable[Batch]) -> tuple[Any, Any, Any]:
    """All steps' indices, (steps, longest), filled up with 0; how many are each step's, and its weight, (steps,)."""
    steps = list(epoch)
    lengths = np.array([len(step.indices) for step in steps], np.int64)
    indices = np.zeros((len(steps), max(lengths, default=0)), np.int64)
    for row, step in zip(indices, steps, strict=True):
        row[: len(step.indices)] = step.indices
    return indices, lengths, np.array([step.weight for step in steps])


class Epochs(InEpochs):
    """Which batches one epoch after the other has, for ``batches_of``."""

    def __init__(self, arrays: Any, share: Shard) -> None:
        self._begin(share)
        self.planned: list[Position] = []
        """Where the iteration begins that ``tf.data`` asks for next, when a loop counts its batches."""
        types = [tf.as_dtype(array.dtype) for array in tf.nest.flatten(arrays)]
        floating = [one for one in types if one.is_floating]
        self._weight_type = tf.float64 if floating[:1] == [tf.float64] else tf.float32

    def begin_pass(self) -> Pass:
        """A pass over the data set."""
        return self._passes.begin(self._next, self.share)

    def __call__(self) -> Iterator[Batch]:
        if self.planned:
            start = self.planned.pop()
        else:
            begun = self.begin_pass()
            start = begun.start
            if start.samples:
                raise InvalidArgumentError(
                    "this data set goes on within an epoch, which only a loop over it outside tf.function can; use "
                    f"such a loop, or restore without the loader and call set_epoch({start.epoch}), which begins the "
                    "epoch anew."
                )
            begun.lose_count()
        return self.share.batches(start.epoch, start.samples)

    def pack(self, parts: Any, weight: tf.Tensor, indices: tf.Tensor) -> Any:
        """A batch, with the weights of "exact" where they are asked for."""
        if self.share.remainder != "exact":
            return parts
        weights = tf.fill(tf.shape(indices), tf.cast(weight, self._weight_type))
        return (*parts, weights) if isinstance(parts, tuple) else (parts, weights)


class ShardedDataset(InEpochs, private.DatasetOver):
    """This rank's part of every global batch; a new order in each epoch. Made by ``hvdkit.tensorflow.shard``.

    A ``tf.data.Dataset``: it can be iterated eagerly and inside ``tf.function``, given to ``model.fit`` and mapped.
    Checkpoints and elastic trainings need its position, which can be counted only where a loop outside ``tf.function``
    iterates it directly: ``tf.data`` reads ahead, so that what is behind ``.map()`` or in ``model.fit`` has taken some
    unknown part of what was read. (For ``fit`` there is ``hvdkit.keras``.)
    """

    _uncounted = (
        "the position in this data set is unknown, because it was iterated inside tf.function, by model.fit or "
        "behind .map() and the like; iterate it directly, in a loop outside tf.function."
    )

    def __init__(self, arrays: Any, share: Shard) -> None:
        self._epochs = Epochs(arrays, share)
        self._arrays = tf.nest.map_structure(within_tensorflow, arrays)  # once, whatever reads them
        self._looks = 0
        self.share, self._passes = share, self._epochs._passes
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_optimization.inject_prefetch = False  # fails on int32 rows, in a loop within tf.function
        self._settings = options
        self._batches = batches_of(self._arrays, self._epochs, self._epochs.pack).with_options(options)
        self._untuned = untuned(self._batches)  # once: what iterates a new one first waits 50 ms
        self._set_length()

    def _set_length(self) -> None:
        """Be a data set of as many batches as an epoch has."""
        whole = tf.data.experimental.assert_cardinality(len(self.share))
        super().__init__(self._batches.apply(whole).with_options(self._settings))

    def __len__(self) -> int:
        return len(self.share)

    def __iter__(self) -> Any:
        if not tf.executing_eagerly():
            return super().__iter__()
        epochs, begun = self._epochs, self._epochs.begin_pass()
        return CountedIterator(self._untuned, begun, lambda: epochs.planned.append(begun.start))

    def take(self, count: int, name: str | None = None) -> tf.data.Dataset:  # noqa: ARG002
        """This rank's first batches of the iteration that comes next, for a look: no position moves.

        Each iteration of what is returned draws the order of another epoch.
        """

        def look() -> Iterator[Batch]:
            start, self._looks = self._next, self._looks + 1
            epoch = start.epoch + self._looks - 1
            return itertools.islice(self.share.batches(epoch, start.samples), count)

        return self._planned(look)

    def evaluation(self) -> tf.data.Dataset:
        """This rank's batches of an evaluation: each sample once on all ranks together, in the data set's order.

        Batches are as in training, with "exact" of weight 1, and dealt out one by one; a rank may have one less than
        another. No position moves.
        """
        return self._planned(lambda: (Batch(indices, 1.0) for indices in self.share.once()))

    def _planned(self, plan: Callable[[], Iterator[Batch]]) -> tf.data.Dataset:
        return untuned(batches_of(self._arrays, plan, self._epochs.pack).with_options(self._settings))

    @property
    def n_samples(self) -> int:
        """Samples in the whole data set, before sharding."""
        return self.share.n_samples

    def _set_share(self, share: Shard) -> None:
        self.share = self._epochs.share = share
        self._set_length()


_INSTEAD = "; of arrays, .map and the like belong before shard, which then gets the tf.data.Dataset"
require_sharded = functools.partial(require_loader, kinds=(InEpochs,), instead=_INSTEAD)
