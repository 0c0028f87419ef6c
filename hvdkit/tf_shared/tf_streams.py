"""A rank's part of any ``tf.data.Dataset``, of known or unknown length, never read into memory (step 7).

No Horovod is loaded here: Keras' torch and jax backends stream, too, over the Horovod that they have.

The native part (read, shuffle, take this rank's samples, batch) runs ahead by itself. Around it, the ranks agree on
each step before it is handed out: ``prefetch(1)`` has them ask for the next one as soon as one was taken, so that the
answer comes while a step computes, and all have asked for the same number whenever they stop.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from hvdkit.core.communicator import Communicator
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.passes import Pass
from hvdkit.steps.same_data import require_same_data
from hvdkit.steps.streams import HEAD, SAME_ORDER, StreamInEpochs, StreamPosition, StreamShare, Total
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.tf_data import (
    CountedIterator,
    Flattened,
    Mapped,
    Shuffled,
    has_first,
    has_slices,
    held,
    in_memory,
    of_one_shape,
    require_one_order,
    require_samples,
    traced,
    untuned,
)

IN_MEMORY = 64 * 2**20
"""Bytes up to which a data set of known length and shapes is kept in memory, as arrays and their slices are."""
BUFFER = 1024
"""Samples in the shuffle buffer of ``shuffle=True``."""
_READ_AHEAD = 2  # batches: TensorFlow's own choice may be hundreds, and memory with them

_plainly = tf.autograph.experimental.do_not_convert
Weigh = Callable[[Any, Any], Any]
Totals = Callable[[str], Total]


class ShardedFiles(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """This rank's file names; ``shard`` finds it behind whatever was built on it. Made by ``shard_files``."""

    def __init__(self, paths: Iterable[Any], world: Topology) -> None:
        names = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
        if len(names) < world.size or len(set(names)) < len(names):
            raise InvalidArgumentError(
                f"shard_files needs at least one file for each of {world.size} ranks, each once, got {len(names)} "
                f"({len(set(names))} different); with fewer, shard the samples: leave shard_files out."
            )
        self.mark = zlib.crc32("\n".join(names).encode()) or 1
        mine = tf.data.Dataset.from_tensor_slices(names[world.rank :: world.size])
        super().__init__(mine, mine._variant_tensor)


def arrays_or_stream(
    dataset: Any,
    world: Topology,
    ranks: Communicator,
    totals: Totals,
    weigh: Weigh,
    *,
    batch_size: int,
    remainder: str,
    shuffle: bool | int,
    seed: int,
) -> tuple[Any, ShardedStream | None]:
    """The samples as arrays where they are few, else a stream; a collective.

    Args:
        ranks: how they reach each other.
        totals: the same in another thread, ``ranks.background``.
        weigh: puts the weights of "exact" into a batch.
        batch_size, remainder, shuffle, seed: of ``shard``.
    Raises:
        InvalidArgumentError: a data set without an end, of batches, or of sparse tensors; bad options.
        AgreementError: the ranks' samples differ, or their order.
    """
    if not isinstance(dataset, tf.data.Dataset):
        arrays = in_memory(dataset)
        require_same_data(ranks, world, tuple(tf.nest.flatten(arrays, expand_composites=True)))
        return arrays, None
    require_samples(dataset)
    files = _find_files(dataset)
    arrays = held(dataset)
    if arrays is None and files is None and _bytes(dataset) <= IN_MEMORY:
        arrays = in_memory(dataset)
        arrays = arrays if has_first(HEAD, dataset, arrays) else None
    few = arrays is not None
    if not few and files is None and world.size > 1:
        require_one_order(dataset)
    stream = None
    if not few:
        buffer = BUFFER if shuffle is True else int(shuffle)
        share = StreamShare(world, batch_size, remainder, buffer, seed, files is not None)
        stream = ShardedStream(dataset, share, totals, weigh, files)
    fix = f"give every rank the same data set, {SAME_ORDER}"
    require_same_data(ranks, world, tuple(tf.nest.flatten(arrays)) if few else (), fix)
    return arrays, stream


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
        self._steps: WeakValueDictionary[int, StepsOfPass] = WeakValueDictionary()
        self._reader = None if files is not None else traced(*reading(source, self._steps))
        self._spec = self._batches(StreamPosition(), 0).element_spec[1]
        self._step = traced(self._agreed(), tf.TensorSpec((), tf.int64))
        self._element_spec = self._pipeline(0).element_spec
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
        return len(self._spec) if isinstance(self._spec, tuple) else 1

    def cardinality(self, name: str | None = None) -> Any:  # noqa: ARG002
        """Unknown."""
        return tf.constant(tf.data.UNKNOWN_CARDINALITY, dtype=tf.int64)

    def map(self, map_func: Any, *_: Any, name: str | None = None, **__: Any) -> ShardedStream:
        """As of ``tf.data.Dataset``, on batches: ``(x, y)``, with "exact" ``(x, y, w)``.

        One batch at a time, while the step before computes, whatever ``num_parallel_calls`` says.
        """
        mapped = copy.copy(self)
        mapped._maps = (*self._maps, (map_func, name))
        mapped._element_spec = mapped._pipeline(0).element_spec
        return mapped

    def prefetch(self, buffer_size: Any, name: str | None = None) -> ShardedStream:  # noqa: ARG002
        """Nothing: batches are read ahead already, and the ranks' steps only by one."""
        return self

    def take(self, count: int, name: str | None = None) -> Any:  # noqa: ARG002
        """This rank's first batches of the pass that comes next, for a look: the ranks ask each other nothing.

        No position moves. Each call draws the order of another epoch.
        """
        start = StreamPosition(self._next.epoch + next(self._looks))
        batches = self._batches(start, 0).map(_plainly(lambda _, parts: parts))
        return self._handed_out(batches.take(count))

    def evaluation(self, steps: int | None = None) -> Any:
        """This rank's batches of an evaluation, as a ``tf.data.Dataset``: each sample once on all ranks together.

        Batches are as in training, with "exact" of weight 1, in the stream's own order, and dealt out one by one; a
        rank may have one less than another. The ranks ask each other nothing, and no position moves.

        Args:
            steps: batches of each rank at most.
        """
        share = self.share
        mine = self._whole() if share.by_files else self._whole().shard(share.world.size, share.world.rank)
        return self._handed_out(mine if steps is None else mine.take(steps))

    def first_of_all(self) -> Any:
        """The first batch of an evaluation, for a rank that has none."""
        return self._handed_out(self._whole().take(1))

    def _whole(self) -> Any:
        batch = self._source.ragged_batch if has_slices(self._source) else self._source.batch
        return batch(self.share.batch_size)

    def _handed_out(self, batches: Any) -> Any:
        """Batches as a pass hands them out, with "exact" of weight 1."""
        if self.share.remainder == "exact":
            is_tuple = isinstance(self._spec, tuple)
            batches = batches.map(_plainly(lambda *parts: self._of_weight_1(parts if is_tuple else parts[0])))
        for function, name in self._maps:
            batches = batches.map(function, name=name)
        return untuned(batches.prefetch(1).with_options(_options()))

    def _of_weight_1(self, parts: Any) -> Any:
        first = tf.nest.flatten(parts)[0]
        rows = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]
        return self._weigh(parts, tf.ones([rows], tf.float64))

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
        under_way = self._passes.in_fit
        return None if under_way is None else under_way.exchange.failure

    def __iter__(self) -> Any:
        if not tf.executing_eagerly():
            raise InvalidArgumentError(
                "this stream is iterated in tf.function, where the steps that were taken cannot be counted; loop over "
                "it outside and call the tf.function for each batch."
            )
        begun, number = self._begin_pass()
        steps = self._steps[number] = StepsOfPass(self._batches(begun.start, number), begun, self._mark)
        return PassIterator(self._pipeline(number), begun, steps, is_counted=not self.in_fit)

    def _batches(self, start: StreamPosition, number: int) -> Any:
        """The native part of a pass: (index (m,), samples), from the epoch's beginning."""
        share, samples = self.share, self._source
        if share.buffer:
            seed = int(np.random.SeedSequence([share.seed, start.epoch]).generate_state(1)[0])
            samples = Shuffled(samples, share.buffer, seed)
        if self._reader is not None:
            samples = Flattened(windows(samples, number), self._reader)
        samples = samples.enumerate()
        if not share.by_files:
            samples = samples.skip(start.samples % share.global_batch).shard(share.world.size, share.world.rank)
        batch = samples.ragged_batch if has_slices(self._source) else samples.batch
        return batch(share.batch_size).prefetch(_READ_AHEAD).with_options(_options())

    def _agreed(self) -> Callable[[Any], Any]:
        """What hands out the next batch of a pass when the ranks agree on it, and ends the pass."""
        exact, passes, spec, weigh = self.share.remainder == "exact", self._steps, self._spec, self._weigh
        kinds = flat(spec)

        def next_of(number: Any) -> list[Any]:
            if (steps := passes.get(int(number))) is None:
                raise StopIteration
            return steps()

        def step(number: Any) -> Any:
            weights, *parts = tf.py_function(next_of, [number], [tf.float64, *(kind.dtype for kind in kinds)])
            weights.set_shape((None,))
            for part, kind in zip(parts, kinds, strict=True):
                part.set_shape(kind.shape)
            packed = tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
            return weigh(packed, weights) if exact else packed

        return step

    def _pipeline(self, number: int) -> Any:
        """The batches of a pass that are handed out, step by step as the ranks agree."""
        batches = Mapped(repeated(number), self._step)
        for function, name in self._maps:
            batches = batches.map(function, name=name)
        return untuned(batches.prefetch(1).with_options(_options()))


def with_weights(parts: Any, weights: Any) -> Any:
    """``(x, y, w)``; w is float64 where the first floating part is, else float32."""
    floating = [part.dtype for part in tf.nest.flatten(parts) if part.dtype.is_floating]
    weights = weights if floating[:1] == [tf.float64] else tf.cast(weights, tf.float32)
    return (*parts, weights) if isinstance(parts, tuple) else (parts, weights)


def _options() -> Any:
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The ranks ask ahead by one step, not by as many as TensorFlow likes.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    # Rewriting the pipeline takes 40 ms at the beginning of each pass.
    options.experimental_optimization.apply_default_optimizations = False
    return options


# One pass: the order of its samples, and steps, on each of which the ranks agree before it is taken -------------------


def repeated(number: int) -> tf.data.Dataset:
    """The same number without end."""
    return tf.data.Dataset.from_tensors(np.int64(number)).repeat()


def reading(source: Any, passes: WeakValueDictionary[int, StepsOfPass]) -> tuple[Callable[..., Any], Any]:
    """What reads the samples of a window, and tells the pass the digests of the first one; its arguments' types.

    A function that is called for each sample would take longer than to read an image.
    """

    def tell(number: Any, hashes: Any) -> Any:
        if (steps := passes.get(int(number))) is not None:
            steps.digests = list(itertools.accumulate(hashes, lambda before, one: zlib.crc32(one, before), initial=0))
        return number

    def read(number: Any, index: Any, window: Any) -> Any:
        samples = tf.data.Dataset.zip(window)

        def first() -> Any:
            hashes = Mapped(samples, traced(_hash_of, samples.element_spec)).batch(HEAD).get_single_element()
            return tf.numpy_function(tell, [number, hashes], tf.int64)

        tf.cond(index == 0, first, lambda: number)
        return samples

    return read, windows(source, 0).element_spec


def windows(samples: Any, number: int) -> Any:
    """The number of the pass, that of the window, and ``HEAD`` samples, which the window does not copy."""
    return tf.data.Dataset.zip((repeated(number), tf.data.Dataset.range(2**62), samples.window(HEAD)))


def _hash_of(*sample: Any) -> Any:
    parts = []
    for part in flat(sample):
        parts += [tf.shape(part), tf.raw_ops.Fingerprint(data=tf.reshape(part, [1, -1]), method="farmhash64")]
    words = [tf.strings.reduce_join(tf.strings.as_string(tf.cast(one, tf.int64)), separator=" ") for one in parts]
    return tf.strings.join(words, ",")


def flat(parts: Any) -> list[Any]:
    """All tensors in a structure; of a ragged one its parts."""
    return tf.nest.flatten(parts, expand_composites=True)  # type: ignore[no-any-return]


class StepsOfPass:
    """One pass: each call is a step, the next batch of this rank and the weights (m,) of its samples.

    Args:
        batches: the native part.
        one: the pass; what comes before its start is left out.
        mark: a digest of the list of files, where the rank has some of its own.
    Attributes:
        digests: of the samples before the first one, the second one, ... up to ``HEAD``.
    """

    def __init__(self, batches: Any, one: Pass, mark: int) -> None:
        self._batches, self._exchange, self._mark = iter(batches), one.exchange, mark
        self._share: StreamShare = one.share
        self._skipped, self._before = divmod(one.start.samples, one.share.global_batch)
        self._first: Any = None
        self.digests = [0]

    def __call__(self) -> list[Any]:
        """Raise StopIteration where no rank has a sample left."""
        size, mark, parts, error = 0, 0, None, None
        try:
            size, mark, parts = self._read()
        except Exception as failure:
            error = of_one_shape(failure)
        first = self._first
        weight = self._exchange.ask(size, mark, error)
        if weight is None:
            self.close()
            raise StopIteration
        if self._share.remainder == "pad":
            parts, size = self._padded(first, parts, size), self._share.batch_size
        elif size == 0:
            parts, size = tf.nest.map_structure(lambda part: part[:1], first), 1
        return [tf.fill((size,), tf.constant(weight, tf.float64)), *flat(parts)]

    def close(self) -> None:
        """Let go of the native part, its threads and buffers."""
        self._batches, self._first = iter(()), None

    def _read(self) -> tuple[int, int, Any]:
        while (found := next(self._batches, None)) is not None:
            indices, parts = found
            if self._first is None:
                self._first, self._first_rows = parts, len(indices)
            if not self._skipped:
                last = int(indices[-1])
                before = last - (last - self._before) % self._share.world.size  # a row has a sample for each rank
                return len(indices), self._mark or self.digests[min(HEAD, before)], parts
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
        one: the pass.
        steps: of the pass.
        is_counted: whether the pass takes the batches here.
    """

    def __init__(self, dataset: Any, one: Pass, steps: StepsOfPass, *, is_counted: bool) -> None:
        self._exchange, self._steps = one.exchange, steps
        super().__init__(dataset, one, is_counted=is_counted)

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
        super().__del__()
        if not sys.is_finalizing():
            self._exchange.settle(max(self._taken, self._pass.taken))
            self._steps.close()
