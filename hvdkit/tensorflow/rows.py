"""Batches of arrays that ``tf.data`` makes itself: Python draws an epoch's order, TensorFlow copies the rows.

A batch made in Python is written to fresh memory and copied once more, which costs large rows most of tf.data's rate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.steps.shards import Batch

LARGE = 16 * 1024
"""Bytes of a row from which on TensorFlow gets a copy of the whole array, to read there."""
PLANNED = 1024
"""Steps whose indices Python hands over at once."""


def batches(
    arrays: Any, epoch: Callable[[], Iterable[Batch]], pack: Callable[[Any, tf.Tensor, tf.Tensor], Any]
) -> tf.data.Dataset:
    """The batches of an epoch, in order, read ahead; another epoch in each iteration.

    Args:
        arrays: NumPy arrays and ragged tensors with a common first axis, in any structure of tuples and dicts.
        epoch: called when an iteration begins.
        pack: makes a batch of its rows, in the structure of ``arrays``, its weight (float64 scalar) and its indices.
    """
    flat = [_within_tensorflow(array) for array in tf.nest.flatten(arrays)]
    outside = [array for array in flat if isinstance(array, np.ndarray)]

    def contents(indices: tf.Tensor, weight: tf.Tensor) -> Any:
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

    signature = (tf.TensorSpec((None, None), tf.int64), tf.TensorSpec((None,), tf.float64))
    plans = tf.data.Dataset.from_generator(lambda: _plans(epoch()), output_signature=signature)
    steps = plans.flat_map(lambda *plan: tf.data.Dataset.from_tensor_slices(plan))
    return steps.map(contents, num_parallel_calls=2, deterministic=True).prefetch(tf.data.AUTOTUNE)


def untuned(whole: tf.data.Dataset) -> tf.data.Dataset:
    """The same without TensorFlow's tuner, for a pipeline of hvdkit's alone, which has nothing to tune.

    The tuner's thread, which the end of an epoch waits for, can miss that it is to end: it then sleeps out its period,
    up to a minute, and as long as the clock was set back beside it.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return whole.with_options(options)


def _within_tensorflow(array: Any) -> Any:
    """A tensor where TensorFlow reads the rows, else the array; what is mapped from a file stays there."""
    if not isinstance(array, np.ndarray):
        return array
    text = array.dtype.kind in "OSU"
    large = array.dtype.itemsize * math.prod(array.shape[1:]) >= LARGE and not isinstance(array, np.memmap)
    if not (text or large):
        return array
    with tf.device("CPU:0"):
        return tf.constant(array)


def _plans(epoch: Iterable[Batch]) -> Iterator[tuple[Any, Any]]:
    """Indices (steps, m) and weights (steps,) of consecutive steps with as many samples."""
    for _, same in itertools.groupby(epoch, key=lambda batch: len(batch.indices)):
        while some := list(itertools.islice(same, PLANNED)):
            yield np.stack([batch.indices for batch in some]), np.array([batch.weight for batch in some])
