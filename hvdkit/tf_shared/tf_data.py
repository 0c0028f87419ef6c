"""Parts of ``tf.data`` that ``hvdkit.tensorflow`` and ``hvdkit.keras`` are made of: checks, data sets, an iterator.

``tf.data`` optimizes a function's graph anew for each iteration, for some milliseconds, unless the function is marked
as one for a single device. And ``map`` traces what it is given, so that a data set made for one epoch traces it anew.
The data sets here have functions of hvdkit's own, and begin an iteration in two milliseconds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.data.ops.structured_function import StructuredFunctionWrapper

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.passes import Pass

_NO_SEED = 87654321  # TensorFlow's, where none is set


# What shard takes -----------------------------------------------------------------------------------------------------


def in_memory(dataset: Any) -> Any:
    """The samples as arrays with a common first axis, in the structure of the data set.

    Raises:
        InvalidArgumentError: neither arrays of one length nor a finite ``tf.data.Dataset`` of samples of one shape.
    """
    if isinstance(dataset, tf.data.Dataset):
        return _read(dataset)
    arrays = tf.nest.map_structure(_array, tuple(dataset) if isinstance(dataset, list) else dataset)
    lengths = {array.shape[0] for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1:
        raise InvalidArgumentError(f"the arrays must have one length, got {', '.join(map(str, sorted(lengths)))}.")
    return arrays


def held(dataset: tf.data.Dataset) -> Any:
    """The arrays that the data set slices, where it does nothing else: they are in memory anyway. None for another."""
    specs = tf.nest.flatten(dataset.element_spec)
    sliced = type(dataset).__name__ == "_TensorSliceDataset"
    if not sliced or any(type(one) is not tf.TensorSpec or one.dtype == tf.string for one in specs):
        return None
    return tf.nest.pack_sequence_as(dataset.element_spec, [np.asarray(one) for one in dataset._tensors])


def has_first(samples: int, dataset: tf.data.Dataset, arrays: Any) -> bool:
    """Whether the arrays have the data set's first samples, read again; those of a random map are others each time."""
    known = {hash(tuple(row.tobytes() for row in rows)) for rows in zip(*tf.nest.flatten(arrays), strict=True)}
    again = (tf.nest.flatten(sample) for sample in dataset.take(samples).as_numpy_iterator())
    return all(hash(tuple(np.asarray(part).tobytes() for part in sample)) in known for sample in again)


_RAGGED = (
    "pad them to one shape in a .map before shard, or make them ragged there "
    "(tf.RaggedTensor.from_tensor(x[tf.newaxis])) and pad each batch in a .map behind it (x.to_tensor()[:, 0])"
)
_SOURCES = "keras.utils.image_dataset_from_directory and its like take batch_size=None"


def require_samples(dataset: tf.data.Dataset) -> None:
    """Raise InvalidArgumentError unless it ends and gives one sample after the other, dense or ragged."""
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise InvalidArgumentError("shard needs a data set that ends, got an endless one; leave .repeat() out.")
    if not all(isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec)) for spec in _specs(dataset)):
        raise InvalidArgumentError("shard needs samples of dense or ragged tensors; make sparse ones dense first.")
    last = dataset
    while type(last).__name__ == "_PrefetchDataset":
        (last,) = last._inputs()
    name = type(last).__name__
    if "PaddedBatch" in name:
        raise InvalidArgumentError(
            "shard needs single samples and batches them itself; leave .padded_batch() out. Where their shapes differ, "
            f"{_RAGGED}."
        )
    if "Batch" in name:
        raise InvalidArgumentError(
            f"shard needs single samples and batches them itself; leave .batch() out. {_SOURCES}."
        )
    if _are_mapped_batches(last):
        raise InvalidArgumentError(
            "shard needs single samples and batches them itself, and these are batches; leave .batch() out and map "
            "samples, or put .unbatch() before shard. Where a batch is one sample, make it with drop_remainder=True. "
            f"{_SOURCES}."
        )


def require_one_order(dataset: tf.data.Dataset) -> None:
    """Raise InvalidArgumentError where it may give its samples in another order on each rank that reads it."""
    if getattr(dataset, "_deterministic", "") == "false":
        raise InvalidArgumentError(
            "the data set has a parallel .map or .interleave with deterministic=False: each rank would read the "
            "samples in another order, see some twice and others never; leave it out, or deal files out with "
            "shard_files."
        )
    for source in dataset._inputs():
        require_one_order(source)


def of_one_shape(error: Exception) -> Exception:
    """The error of a batch, in hvdkit's words where its samples have different shapes."""
    told = re.search(r"Cannot batch tensors with different shapes.*?(First element .*?\]\.)", str(error))
    if told is None:
        return error
    return InvalidArgumentError(f"the samples have different shapes ({told[1].rstrip('.')}); {_RAGGED}.")


def _array(value: Any) -> Any:
    if isinstance(value, tf.RaggedTensor):
        return value
    if isinstance(value, tf.SparseTensor):
        raise InvalidArgumentError("shard takes no tf.SparseTensor; give tf.sparse.to_dense(it).numpy().")
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


def _specs(dataset: tf.data.Dataset) -> list[Any]:
    return tf.nest.flatten(dataset.element_spec)  # type: ignore[no-any-return]


def has_slices(dataset: tf.data.Dataset) -> bool:
    """Whether samples have slices of a ragged tensor, which are dense and of any length themselves."""
    return any(isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 0 for spec in _specs(dataset))


def _are_mapped_batches(dataset: tf.data.Dataset) -> bool:
    """Whether something was batched, and then mapped, shuffled and the like to what is of any length itself."""
    while len(dataset._inputs()) == 1:
        shapes, kind = [spec.shape for spec in _specs(dataset)], type(dataset).__name__
        if any(shape.rank == 0 or (shape.rank and shape[0] is not None) for shape in shapes):
            return False
        if any(again in kind for again in ("Unbatch", "FlatMap", "Interleave")):
            return False
        if any(batches in kind for batches in ("Batch", "GroupByWindow")):
            return True
        (dataset,) = dataset._inputs()
    return False


# Data sets and an iterator of hvdkit's own ----------------------------------------------------------------------------


def untuned(whole: tf.data.Dataset) -> tf.data.Dataset:
    """The same without TensorFlow's tuner, for a pipeline of hvdkit's alone, which has nothing to tune.

    The tuner's thread, which the end of an epoch waits for, can miss that it is to end: it then sleeps out its period,
    up to a minute, and as long as the clock was set back beside it.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return whole.with_options(options)


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


class CountedIterator(OwnedIterator):  # type: ignore[misc]
    """A ``tf.data`` iterator that counts how many batches the loop has taken; ``tf.data`` itself reads ahead.

    Args:
        dataset: what to iterate.
        one: the pass that takes them.
        begin: called before the first batch; None where nothing else begins a pass that a function takes from.
        is_counted: False: somebody else counts.
    """

    def __init__(
        self, dataset: Any, one: Pass, begin: Callable[[], None] | None = None, *, is_counted: bool = True
    ) -> None:
        super().__init__(dataset)
        self._pass, self._begin, self._is_counted = one, begin, is_counted
        self._taken = 0

    def _next_internal(self) -> Any:
        if not tf.executing_eagerly():
            self._lose_count()
            return super()._next_internal()
        if self._taken == 0 and self._begin is not None:
            self._begin()
        try:
            contents = super()._next_internal()
        except tf.errors.OutOfRangeError:
            self._pass.close(has_ended=True)
            raise
        self._taken += 1
        if self._is_counted:
            self._pass.take()
        return contents

    def get_next_as_optional(self) -> Any:
        self._lose_count()
        return super().get_next_as_optional()

    @property
    def _type_spec(self) -> Any:  # asked for when it is an argument of a tf.function
        self._lose_count()
        return super()._type_spec

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _lose_count(self) -> None:
        """It goes into a ``tf.function``, where nobody counts."""
        if self._taken == 0 and self._begin is not None:
            self._pass.close()
        elif self._is_counted:
            self._pass.lose_count()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._pass.close()
