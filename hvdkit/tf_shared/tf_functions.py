"""Parts of a ``tf.data`` pipeline with functions of hvdkit's own, which begin an iteration in two milliseconds.

``tf.data`` optimizes a function's graph anew for each iteration, for some milliseconds, unless the function is marked
as one for a single device. And ``map`` traces what it is given, so that a data set made for one epoch traces it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops.structured_function import StructuredFunctionWrapper

_NO_SEED = 87654321  # TensorFlow's, where none is set


def traced(function: Callable[..., Any], spec: Any) -> StructuredFunctionWrapper:
    """A function for the data sets below, once for all of those whose elements are of the type ``spec``."""
    marks = {"experimental_ints_on_device": True}
    return StructuredFunctionWrapper(function, "shard()", input_structure=spec, defun_kwargs=marks)


class Shuffled(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """``source.shuffle(buffer, seed, reshuffle_each_iteration=False)``, which by itself reads TensorFlow's seed, too.

    That seed is each rank's own, and the order must be the same on all.
    """

    def __init__(self, source: tf.data.Dataset, buffer: int, seed: int) -> None:
        seeds = {"seed": tf.constant(_NO_SEED, tf.int64), "seed2": tf.constant(seed, tf.int64)}
        size = tf.constant(buffer, tf.int64)
        variant = tf.raw_ops.ShuffleDataset(
            input_dataset=source._variant_tensor,
            buffer_size=size,
            **seeds,
            reshuffle_each_iteration=False,
            **source._flat_structure,
        )
        super().__init__(source, variant)


class Mapped(dataset_ops.UnaryDataset):  # type: ignore[misc]
    """``source.map(function)``, one element after the other; StopIteration in a Python function ends it."""

    def __init__(self, source: tf.data.Dataset, function: StructuredFunctionWrapper) -> None:
        self._function = function
        made = function.function
        variant = self._variant(source._variant_tensor, f=made, other_arguments=made.captured_inputs)
        super().__init__(source, variant)

    def _variant(self, source: tf.Tensor, **function: Any) -> tf.Tensor:
        return tf.raw_ops.MapDataset(
            input_dataset=source, **function, preserve_cardinality=False, force_synchronous=True, **self._flat_structure
        )

    @property
    def element_spec(self) -> Any:
        """As of what the function returns."""
        return self._function.output_structure

    def _functions(self) -> list[Any]:
        return [self._function]


class MappedByTwo(Mapped):
    """``source.map(function, num_parallel_calls=2, deterministic=True)``."""

    def _variant(self, source: tf.Tensor, **function: Any) -> tf.Tensor:
        calls = tf.constant(2, tf.int64)
        return tf.raw_ops.ParallelMapDatasetV2(
            input_dataset=source, **function, num_parallel_calls=calls, deterministic="true", **self._flat_structure
        )


class Flattened(Mapped):
    """``source.flat_map(function)``."""

    def _variant(self, source: tf.Tensor, **function: Any) -> tf.Tensor:
        return tf.raw_ops.FlatMapDataset(input_dataset=source, **function, **self._flat_structure)

    @property
    def element_spec(self) -> Any:
        """As of the data sets that the function returns."""
        return self._function.output_structure.element_spec
