"""Batches of arrays that ``tf.data`` makes itself: Python draws an epoch's order, TensorFlow copies the rows.

A batch made in Python is written to fresh memory and copied once more, which costs large rows most of tf.data's rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.steps.shards import Batch
from hvdkit.tf_shared.tf_functions import Flattened, MappedByTwo, traced

LARGE, SMALL = 16 * 1024, 256 * 2**20
"""TensorFlow gets a copy of an array whose rows have so many bytes and more, or that as a whole has no more than these.

Python hands over rows at half of TensorFlow's rate, and waits with the training thread for the interpreter's lock.
"""


def batches(
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
