"""One pass over a stream: the order of its samples, and steps, on each of which the ranks agree before it is taken."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import tensorflow as tf

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.passes import Pass
from hvdkit.steps.streams import HEAD, StreamShare
from hvdkit.tf_shared.tf_functions import Mapped, traced
from hvdkit.tf_shared.tf_samples import CountedIterator, of_one_shape


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
