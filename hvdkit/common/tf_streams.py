"""A rank's part of any ``tf.data.Dataset``, of known or unknown length, never read into memory (step 7).

No Horovod is loaded here: Keras' torch and jax backends stream, too, over the Horovod that they have.

The native part (read, shuffle, take this rank's samples, batch) runs ahead by itself. Around it, the ranks agree on
each step before it is handed out: ``prefetch(1)`` has them ask for the next one as soon as one was taken, so that the
answer comes while a step computes, and all have asked for the same number whenever they stop.
"""

from __future__ import annotations

import copy
import os
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.common.tf_samples import CountedIterator, has_first, in_memory, untuned
from hvdkit.errors import AgreementError, InvalidArgumentError
from hvdkit.steps.collectives import Collectives
from hvdkit.steps.streams import HEAD, Exchange, StreamInEpochs, StreamPosition, StreamShare, Total
from hvdkit.steps.topology import Topology

IN_MEMORY = 64 * 2**20
"""Bytes up to which a data set of known length and shapes is kept in memory, as arrays are."""
BUFFER = 1024
"""Samples in the shuffle buffer of ``shuffle=True``."""
_READ_AHEAD = 2  # batches: TensorFlow's own choice may be hundreds, and memory with them

Weigh = Callable[[Any, Any], Any]
Totals = Callable[[str], Total]


class ShardedFiles(tf.data.Dataset):  # type: ignore[misc]
    """This rank's file names; ``shard`` finds it behind whatever was built on it. Made by ``shard_files``."""

    def __init__(self, paths: Iterable[Any], world: Topology) -> None:
        names = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
        if len(names) < world.size or len(set(names)) < len(names):
            raise InvalidArgumentError(
                f"shard_files needs at least one file for each of {world.size} ranks, each once, got {len(names)} "
                f"({len(set(names))} different); with fewer, shard the samples: leave shard_files out."
            )
        self.mark = zlib.crc32("\n".join(names).encode()) or 1
        self._names = tf.data.Dataset.from_tensor_slices(names[world.rank :: world.size])
        super().__init__(self._names._variant_tensor)

    def _inputs(self) -> list[Any]:
        return [self._names]

    @property
    def element_spec(self) -> Any:
        """The type of a name."""
        return self._names.element_spec


def arrays_or_stream(
    dataset: Any, world: Topology, ranks: Collectives, totals: Totals, weigh: Weigh, **options: Any
) -> tuple[Any, ShardedStream | None]:
    """The samples as arrays where they are few, else a stream; a collective for a ``tf.data.Dataset``.

    Args:
        ranks: how they reach each other.
        totals: the same in another thread, see ``totals``.
        weigh: puts the weights of "exact" into a batch.
        options: of ``shard``.
    Raises:
        InvalidArgumentError: a data set without an end, of batches, or of sparse tensors; bad options.
        AgreementError: the ranks' samples differ, or their order.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return in_memory(dataset), None
    _require_samples(dataset)
    files = _find_files(dataset)
    few = files is None and _bytes(dataset) <= IN_MEMORY
    arrays = in_memory(dataset) if few else None
    if few and not has_first(HEAD, dataset, arrays):
        few, arrays = False, None
    stream = None if few else ShardedStream(dataset, _share(world, files is not None, **options), totals, weigh, files)
    if world.size > 1:
        mark = 0
        for array in tf.nest.flatten(arrays) if few else ():
            mark = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes(), mark)
        everyone = {tuple(row[0]) for row in ranks.gather(np.array([[few, mark]], dtype=np.int64), "hvdkit.shard")}
        if len(everyone) > 1:
            raise AgreementError(
                "the ranks' data sets hold different samples, or the same in different orders: some would be seen "
                "twice and others by nobody; give every rank the same data set, its shuffle a seed "
                "(shuffle(n, seed=...)) or leave shuffling to shard, and put random maps behind shard."
            )
    return arrays, stream


def _share(world: Topology, by_files: bool, *, batch_size: int, remainder: str, shuffle: Any, seed: int) -> StreamShare:
    return StreamShare(world, batch_size, remainder, BUFFER if shuffle is True else int(shuffle), seed, by_files)


def _find_files(dataset: Any) -> ShardedFiles | None:
    if isinstance(dataset, ShardedFiles):
        return dataset
    return next(filter(None, map(_find_files, dataset._inputs())), None)


def _bytes(dataset: Any) -> float:
    """What the samples take in memory; infinite where that is not known, or ``in_memory`` says what is wrong."""
    specs = tf.nest.flatten(dataset.element_spec)
    samples = int(dataset.cardinality())
    if samples == tf.data.UNKNOWN_CARDINALITY or not all(
        isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() and spec.dtype != tf.string for spec in specs
    ):
        return float("inf")
    return float(samples * sum(spec.shape.num_elements() * spec.dtype.size for spec in specs))


class ShardedStream(StreamInEpochs, tf.data.Dataset):  # type: ignore[misc]
    """This rank's part of every global step of a stream. Made by ``shard`` of a ``tf.data.Dataset``.

    Iterate it outside ``tf.function``, or give it to Keras' ``fit``. ``.map`` acts on batches and keeps the position;
    other transformations belong before ``shard``.
    """

    def __init__(
        self, source: Any, share: StreamShare, totals: Totals, weigh: Weigh, files: ShardedFiles | None = None
    ) -> None:
        self._source, self._weigh = source, weigh
        self._mark = files.mark if files is not None else 0
        self._maps: tuple[tuple[Any, str | None], ...] = ()
        self.in_fit = False
        self._begin_stream(share, totals if share.world.size > 1 else lambda _: lambda mine: mine)
        self._spec = self._batches(StreamPosition())[0].element_spec
        self._element_spec = self._pipeline(lambda: [], self._spec[1]).element_spec
        super().__init__(None)

    def _inputs(self) -> list[Any]:
        return []

    @property
    def _variant_tensor(self) -> Any:
        raise InvalidArgumentError(
            "only .map and .prefetch can follow shard: anything else would change how many batches this rank takes, or "
            "hide how far it is; put it before shard."
        )

    @property
    def element_spec(self) -> Any:
        """The type of a batch."""
        return self._element_spec

    @property
    def parts(self) -> int:
        """1 where a sample is x alone, 2 of ``(x, y)``, 3 of ``(x, y, sample_weight)``."""
        return len(self._spec[1]) if isinstance(self._spec[1], tuple) else 1

    def cardinality(self, name: str | None = None) -> Any:  # noqa: ARG002
        """Unknown."""
        return tf.constant(tf.data.UNKNOWN_CARDINALITY, dtype=tf.int64)

    def map(self, map_func: Any, *_: Any, name: str | None = None, **__: Any) -> ShardedStream:
        """As of ``tf.data.Dataset``, on batches: ``(x, y)``, with "exact" ``(x, y, w)``.

        One batch at a time, while the step before computes, whatever ``num_parallel_calls`` says.
        """
        mapped = copy.copy(self)
        mapped._maps = (*self._maps, (map_func, name))
        mapped._element_spec = mapped._pipeline(lambda: [], self._spec[1]).element_spec
        return mapped

    def prefetch(self, buffer_size: Any, name: str | None = None) -> ShardedStream:  # noqa: ARG002
        """Nothing: batches are read ahead already, and the ranks' steps only by one."""
        return self

    def reader(self) -> ShardedStream:
        """The same for one ``fit``, whose iteration moves no position: ``advance`` does."""
        read = copy.copy(self)
        read.in_fit = True
        return read

    def go_to(self, other: ShardedStream) -> None:
        """Nothing: all that were made of one stream are at one place."""

    @property
    def failure(self) -> Exception | None:
        """Why the pass under way cannot go on, which TensorFlow says in a text of its own."""
        return None if self._place.exchange is None else self._place.exchange.failure

    def __iter__(self) -> Any:
        if not tf.executing_eagerly():
            _raise_in_function()
        exchange, start = self._begin_pass()
        batches, skipped = self._batches(start)
        steps = Steps(iter(batches), exchange, self.share, skipped)
        place = self._place

        def took(batches: int) -> None:
            if not self.in_fit and place.exchange is exchange:
                place.taken = batches

        def lost() -> None:
            place.lost = not self.in_fit

        return PassIterator(self._pipeline(steps, self._spec[1]), exchange, place, steps, took, lost)

    def _batches(self, start: StreamPosition) -> tuple[Any, int]:
        """The native part: (mark (m,), samples), from the epoch's beginning; and how many of them were taken."""
        share, epoch = self.share, start.epoch
        taken, first = divmod(start.samples, share.global_batch)
        samples = self._source
        if share.buffer:
            seed = int(np.random.SeedSequence([share.seed, epoch]).generate_state(1)[0])
            samples = samples.shuffle(share.buffer, seed=seed, reshuffle_each_iteration=False)
        if share.by_files:
            marked = samples.map(lambda *parts: (np.int64(self._mark), parts if len(parts) > 1 else parts[0]))
        else:
            start_of_scan = (tf.zeros((), tf.int64),) * 3
            marked = samples.scan(start_of_scan, lambda state, one: _digested(state, one, first, share.world.size))
            marked = marked.skip(first).shard(share.world.size, share.world.rank)
        return marked.batch(share.batch_size).prefetch(_READ_AHEAD).with_options(_options()), taken

    def _pipeline(self, steps: Callable[[], list[Any]], spec: Any) -> Any:
        """The batches that are handed out, step by step as the ranks agree."""
        flat = tf.nest.flatten(spec, expand_composites=True)

        def step(_: Any) -> tuple[Any, Any]:
            weights, *parts = tf.py_function(steps, [], [tf.float64, *(part.dtype for part in flat)])
            weights.set_shape((None,))
            for part, like in zip(parts, flat, strict=True):
                part.set_shape(like.shape)
            return weights, tf.nest.pack_sequence_as(spec, parts, expand_composites=True)

        exact = self.share.remainder == "exact"
        agreed = tf.data.Dataset.counter().map(step).take_while(lambda weights, _: tf.size(weights) > 0)
        batches = agreed.map(lambda weights, parts: self._weigh(parts, weights) if exact else parts)
        for function, name in self._maps:
            batches = batches.map(function, name=name)
        return untuned(batches.prefetch(1).with_options(_options()))


class Steps:
    """One pass: each call is a step, the next batch of this rank and the weights (m,) of its samples, () at the end.

    Args:
        batches: of (mark (m,), samples).
        exchange: of this pass.
        share: this rank's part.
        skipped: batches to leave out, which were trained before.
    """

    def __init__(self, batches: Any, exchange: Exchange, share: StreamShare, skipped: int) -> None:
        self._batches, self._exchange, self._share, self._skipped = batches, exchange, share, skipped
        self._first: Any = None

    def __call__(self) -> list[Any]:
        size, mark, parts, error = 0, 0, None, None
        try:
            size, mark, parts = self._read()
        except Exception as failure:
            error = failure
        first = self._first
        weight = self._exchange.ask(size, mark, error)
        if weight is None:
            self.close()
            return [tf.zeros((0,), tf.float64), *_flat(first)]
        if self._share.remainder == "pad":
            parts, size = self._padded(first, parts, size), self._share.batch_size
        elif size == 0:
            parts, size = tf.nest.map_structure(lambda part: part[:1], first), 1
        return [tf.fill((size,), tf.constant(weight, tf.float64)), *_flat(parts)]

    def close(self) -> None:
        """Let go of the native part, its threads and buffers: TensorFlow keeps a function that it once called."""
        self._batches, self._first = iter(()), None

    def _read(self) -> tuple[int, int, Any]:
        while (found := next(self._batches, None)) is not None:
            marks, parts = found
            if self._first is None:
                self._first, self._first_rows = parts, len(marks)
            if not self._skipped:
                return len(marks), int(marks[-1]), parts
            self._skipped -= 1
        if self._first is None and self._skipped:
            raise InvalidArgumentError("the data set to go on in has no samples now; give the one of the checkpoint.")
        return 0, 0, None

    def _padded(self, first: Any, parts: Any, size: int) -> Any:
        fill = np.arange(self._share.batch_size - size) % self._first_rows
        added = tf.nest.map_structure(lambda part: tf.gather(part, fill), first)
        return tf.nest.map_structure(lambda *both: tf.concat(both, 0), parts, added) if size else added


class PassIterator(CountedIterator):
    """An iterator of one pass that raises what went wrong there, and leaves together with the other ranks.

    Args:
        exchange: of the pass.
        place: counts what was taken where the iterator cannot.
        steps: of the pass.
        took, lost: see ``CountedIterator``.
    """

    def __init__(self, dataset: Any, exchange: Exchange, place: Any, steps: Steps, took: Any, lost: Any) -> None:
        self._exchange, self._place, self._steps = exchange, place, steps
        super().__init__(dataset, lambda: None, took, lost)

    def _next_internal(self) -> Any:
        try:
            return super()._next_internal()
        except tf.errors.OutOfRangeError:
            raise
        except tf.errors.OpError:
            if self._exchange.failure is not None:
                raise self._exchange.failure from None
            raise

    def __del__(self) -> None:
        if not sys.is_finalizing():
            trained = self._place.taken if self._place.exchange is self._exchange else 0
            self._exchange.settle(max(self._taken, trained))
            self._steps.close()


def total(hvd: Any, name: str) -> Total:
    """A sum over the ranks for another thread than the one that trains; ``name``: of one pass alone.

    Args:
        hvd: ``horovod.tensorflow``.

    Outside of a function TensorFlow gives all of Horovod's operations one name, by which those of two threads would
    meet.
    """
    summed = tf.function(lambda mine: hvd.allreduce(mine, op=hvd.Sum, name=name), autograph=False)

    def add_up(mine: Any) -> Any:
        with tf.device("/CPU:0"):
            return summed(tf.constant(mine)).numpy()

    return add_up


def with_weights(parts: Any, weights: Any) -> Any:
    """``(x, y, w)``; w is float64 where the first floating part is, else float32."""
    floating = [part.dtype for part in tf.nest.flatten(parts) if part.dtype.is_floating]
    weights = weights if floating[:1] == [tf.float64] else tf.cast(weights, tf.float32)
    return (*parts, weights) if isinstance(parts, tuple) else (parts, weights)


def _digested(state: Any, sample: Any, first: int, size: int) -> Any:
    """A sample with a digest of those before its row of ``size`` samples, one for each rank."""
    index, digest, row = state

    def add() -> Any:
        parts = map(tf.io.serialize_tensor, _flat(sample))
        return tf.strings.to_hash_bucket_fast(tf.strings.join([tf.strings.as_string(digest), *parts]), 2**40)

    row = tf.where(tf.math.floormod(index - first, size) == 0, digest, row)
    return (index + 1, tf.cond(index < HEAD, add, lambda: digest), row), (row, sample)


def _require_samples(dataset: Any) -> None:
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise InvalidArgumentError("shard needs a data set that ends, got an endless one; leave .repeat() out.")
    if not all(
        isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec)) for spec in tf.nest.flatten(dataset.element_spec)
    ):
        raise InvalidArgumentError("shard needs samples of dense or ragged tensors; make sparse ones dense first.")
    last = dataset
    while any(kind in type(last).__name__ for kind in ("Prefetch", "Cache", "Shuffle", "Take", "Skip", "Options")):
        (last,) = last._inputs()
    if "Batch" in type(last).__name__:
        raise InvalidArgumentError(
            "shard needs single samples and batches them itself; leave .batch() out, or .unbatch() the data, and give "
            "keras.utils.image_dataset_from_directory and its like batch_size=None."
        )


def _options() -> Any:
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The ranks ask ahead by one step, not by as many as TensorFlow likes.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return options


def _flat(parts: Any) -> list[Any]:
    return tf.nest.flatten(parts, expand_composites=True)  # type: ignore[no-any-return]


def _raise_in_function() -> None:
    raise InvalidArgumentError(
        "this stream is iterated in tf.function, where the steps that were taken cannot be counted; loop over it "
        "outside and call the tf.function for each batch."
    )
