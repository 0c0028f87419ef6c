"""Counts the exchanges between ranks by size and by duration while a recording is read: a fused batch counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hvdkit.read.timeline.model import CycleMark, Operation
from hvdkit.read.timeline.reader import Recording


class Exchanges:
    """Histograms in powers of two: bin k holds at least 2**(k-1) and less than 2**k; bin 0 holds nothing at all.

    Attributes:
        count, fused: exchanges, and how many of them went through the fusion buffer.
        by_size: bin of bytes to number of exchanges.
        time_by_size: bin of bytes to microseconds in exchanges.
        by_duration: bin of microseconds to number of exchanges.
        unknown: exchanges whose size the file does not say; they are in ``by_duration`` only.
    """

    def __init__(self) -> None:
        """Starts without any exchange."""
        self.count = self.fused = self.unknown = 0
        self.by_size: Counter[int] = Counter()
        self.time_by_size: Counter[int] = Counter()
        self.by_duration: Counter[int] = Counter()
        self._batch: tuple[float, float, float] | None = None

    def add(self, operation: Operation) -> None:
        """Takes the next operation, in the order in which they ended.

        A fused operation that started before the collective of the batch is one of it: Horovod writes the start of all
        tensors of a batch before the one collective, and starts the next batch after that.
        """
        collective = operation.collective
        if collective is None:
            return
        size = float("nan") if operation.bytes is None else float(operation.bytes)
        if not operation.fused:
            self._count(size, collective.end - collective.start)
            return
        if self._batch is not None and operation.start <= self._batch[1] and collective.start <= self._batch[2]:
            total, start, end = self._batch
            self._batch = (total + size, min(start, collective.start), max(end, collective.end))
        else:
            self.finish()
            self._batch = (size, collective.start, collective.end)

    def finish(self) -> None:
        """Counts the batch that is still open."""
        if self._batch is not None:
            size, start, end = self._batch
            self._batch = None
            self.fused += 1
            self._count(size, end - start)

    def _count(self, size: float, microseconds: float) -> None:
        self.count += 1
        self.by_duration[int(microseconds).bit_length()] += 1
        if size != size:
            self.unknown += 1
            return
        bin_ = int(size).bit_length()
        self.by_size[bin_] += 1
        self.time_by_size[bin_] += round(microseconds)


class CountedRecording(Recording):
    """A recording that counts its exchanges in ``exchanges`` each time it is read."""

    exchanges: Exchanges

    def batches(self) -> Iterator[list[Operation | CycleMark]]:
        """As in Recording."""
        self.exchanges = Exchanges()
        for batch in super().batches():
            for item in batch:
                if isinstance(item, Operation):
                    self.exchanges.add(item)
            yield batch
        self.exchanges.finish()
