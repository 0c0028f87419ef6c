"""Step 7 where nobody knows how many samples there are: what the ranks tell each other before each step.

A stream is one order of samples that all ranks read (rank k takes every size-th from the k-th on), or each rank's own
files. The ranks agree batch by batch whether all still have data, and what a sample counts.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.errors import AgreementError, CheckpointError, DataError, InvalidArgumentError, name_ranks, whole
from hvdkit.steps import passes
from hvdkit.steps.passes import Pass, Passes
from hvdkit.steps.shards import REMAINDERS, InEpochs, Position, stream_weights
from hvdkit.steps.topology import Topology

HEAD = 64
"""Samples at the start of an epoch that must be the same, in the same order, on all ranks that read one stream."""
_FAILED = -1
_SETTLE_S = 30.0
_streams = itertools.count()
Total = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]

SAME_ORDER = (
    "give its shuffle a seed (shuffle(n, seed=...), list_files(..., shuffle=False)) or leave shuffling to hvdkit "
    "(shard(..., shuffle=n)), put random maps behind shard, and deal files out with shard_files. After "
    "seed_everything make what shuffles before broadcast_state, from which on each rank draws its own numbers"
)


@dataclass(frozen=True, slots=True)
class StreamShare:
    """A rank's share of a stream; what ``Shard`` is for data whose samples can be counted and picked.

    Args:
        world, batch_size, remainder, seed: as for ``Shard``. "pad" fills a rank's last step with its first samples.
        buffer: samples among which the next one is drawn, anew in each epoch; 0: the stream's own order.
        by_files: each rank reads files of its own.
    Raises:
        InvalidArgumentError: a number out of range, or an unknown policy.
    """

    world: Topology
    batch_size: int
    remainder: str
    buffer: int
    seed: int
    by_files: bool

    def __post_init__(self) -> None:
        if self.remainder not in REMAINDERS:
            raise InvalidArgumentError(f"remainder must be one of {', '.join(REMAINDERS)}, got {self.remainder!r}.")
        for field, name, least in (("batch_size", "batch_size", 1), ("seed", "seed", 0), ("buffer", "shuffle", 0)):
            object.__setattr__(self, field, whole(name, getattr(self, field), least))

    @property
    def global_batch(self) -> int:
        """Samples per step on all ranks together, but for an epoch's end."""
        return self.batch_size * self.world.size

    @property
    def n_samples(self) -> int:
        """Nobody knows.

        Raises:
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError(
            "nobody counts the samples of a stream; hvdkit's own fit needs arrays; use Keras' fit or write the loop."
        )

    def facts(self, epoch: int) -> dict[str, float]:
        """As of ``Shard``."""
        numbers = {"epoch": epoch, "batch_size": self.batch_size, "seed": self.seed, "shuffle": self.buffer}
        numbers["remainder"] = REMAINDERS.index(self.remainder)
        return {f"loader.{name}": float(value) for name, value in numbers.items()}


@dataclass(slots=True)
class StreamPosition(Position):
    """Where a training is in a stream; ``samples`` are the steps of the epoch times the samples of a full one."""

    before: int = 0  # the same of all epochs before
    order: int = 0  # a digest of the epoch's first samples, where they are known; 0: not

    def after(self, share: Any, step: int) -> StreamPosition:
        """The position after ``step`` more steps, in the same epoch."""
        return StreamPosition(self.epoch, self.samples + step * share.global_batch, self.before, self.order)

    def next_epoch(self) -> StreamPosition:
        """The beginning of the next epoch."""
        return StreamPosition(self.epoch + 1, 0, self.before + self.samples)

    def state(self, share: Any) -> dict[str, Any]:
        """As plain values for a checkpoint."""
        counted = {"epoch": self.epoch, "position": self.samples, "samples": self.before + self.samples}
        return {**counted, **_identity(share), "size": share.world.size, "order": self.order}

    @classmethod
    def of(cls, state: Mapping[str, Any], share: Any) -> StreamPosition:
        """Where ``state`` was taken.

        Raises:
            CheckpointError: it belongs to other data or another order, or is none.
        """
        for name, mine in _identity(share).items():
            if state.get(name) != mine:
                raise CheckpointError(
                    f"the checkpoint's stream had {name}={state.get(name)}, this one has {mine}; shard the same data "
                    "in the same way, or restore without the loader."
                )
        numbers: list[Any] = [state.get(name) for name in ("epoch", "position", "samples", "order", "size")]
        if not all(isinstance(one, int) and one >= 0 for one in numbers) or numbers[2] < numbers[1]:
            raise CheckpointError(f"the checkpoint's position in the stream is none: {dict(state)}.")
        epoch, samples, total, order, size = numbers
        if share.by_files and samples and (size != share.world.size or samples % share.global_batch):
            raise CheckpointError(
                f"the checkpoint is from the middle of an epoch on {size} ranks that read files of their own, and "
                f"this job has {share.world.size} with batches of {share.batch_size}: their files are others; go on "
                "with the same ranks and batch size, or from a checkpoint at an epoch's end."
            )
        return cls(epoch, samples, total - samples, order)

    def steps(self, share: Any) -> int:
        """Steps that lead here from the beginning, with as many ranks as ``share`` has."""
        steps: int = -(-self.before // share.global_batch) + -(-self.samples // share.global_batch)
        return steps


def _identity(share: StreamShare) -> dict[str, Any]:
    return {"stream": "files" if share.by_files else "samples", "seed": share.seed, "shuffle": share.buffer}


class StreamExchange:
    """What the ranks tell each other in one pass over a stream: one small sum before each step, in order.

    Args:
        total: adds up float64 arrays over the ranks, in whichever thread asks.
        share: this rank's part.
        start: where the pass begins.
    """

    def __init__(self, total: Total, share: StreamShare, start: StreamPosition) -> None:
        self._total, self._share, self._start = total, share, start
        self._changed = threading.Condition()
        self.answered = 0  # steps that were agreed on
        self._ended = False
        self._first_filler: int | None = None
        self.order = start.order  # a digest of the epoch's first samples, where they are known
        self.failure: Exception | None = None  # what it raised; a framework that runs it shows a text of its own

    def ask(self, size: int, mark: int, error: Exception | None = None) -> float | None:
        """What each of this rank's samples counts in the next step; None: no rank takes one.

        Args:
            size: this rank's samples for it.
            mark: a digest of the order that they come from.
            error: why there are none, where this rank's data failed.
        Raises:
            DataError, InvalidArgumentError, AgreementError: on every rank; where data failed, ``error`` itself.
        """
        try:
            weight = self._ask(_FAILED if error else size, mark)
        except Exception as failure:
            with self._changed:
                self.failure = error or failure
                self._changed.notify_all()
            raise self.failure from None
        with self._changed:
            if weight is None:
                self._ended = True
            else:
                if size == 0 and self._first_filler is None:
                    self._first_filler = self.answered
                self.answered += 1
            self._changed.notify_all()
        return weight

    def _ask(self, size: int, mark: int) -> float | None:
        rank, everyone = self._share.world.rank, np.zeros((self._share.world.size, 2))
        everyone[rank] = size, mark
        sizes, marks = self._total(everyone).astype(np.int64).T.tolist()
        self._require_data(sizes)
        self._require_order(sizes, marks)
        weights = stream_weights(sizes, self._share.batch_size, self._share.remainder)
        return None if weights is None else weights[rank]

    def _require_data(self, sizes: list[int]) -> None:
        failed = [rank for rank, size in enumerate(sizes) if size == _FAILED]
        if failed:
            raise DataError(f"the data set of {name_ranks(failed)} raised an error, which that rank shows.")
        if self.answered or self._start.samples:
            return
        wanted = self._share.batch_size if self._share.remainder == "drop" else 1
        short = [rank for rank, size in enumerate(sizes) if size < wanted]
        if short:
            raise InvalidArgumentError(
                f"the data set of {name_ranks(short)} has fewer than {wanted} samples, so that no step is left; use "
                "smaller batches or remainder='exact', and at least one sample (one file) for every rank."
            )

    def _require_order(self, sizes: list[int], marks: list[int]) -> None:
        """Marks are of the whole order before a batch's last row; they can be compared where batches are full."""
        share = self._share
        full = [mark for mark, size in zip(marks, sizes, strict=True) if size == share.batch_size]
        epoch = self._start.epoch + 1
        if len(set(full)) > 1:
            raise AgreementError(
                f"the ranks' files are not parts of one list in epoch {epoch}: give shard_files the same paths in the "
                "same order on every rank (sorted)."
                if share.by_files
                else f"the ranks read the samples in different orders in epoch {epoch}: some would be seen twice and "
                f"others by nobody; {SAME_ORDER}."
            )
        rows = (self._start.samples // share.global_batch + self.answered + 1) * share.batch_size - 1
        if not full or (not share.by_files and rows * share.world.size < HEAD):
            return
        if self.order not in (0, full[0]):
            raise AgreementError(
                f"epoch {epoch} begins with other samples than when the checkpoint was made: some would be seen twice "
                f"and others by nobody; {SAME_ORDER}. (A shuffle with a seed draws a new order each time that it is "
                "read, unless reshuffle_each_iteration=False.)"
            )
        self.order = full[0]

    def goes_on_after(self, taken: int) -> bool:
        """Whether there is a step after ``taken`` ones, which the ranks ask each other as soon as they have taken them.

        It raises what ``ask`` raised then.
        """
        self._wait(taken, None)
        if self.answered <= taken and self.failure is not None:
            raise self.failure
        return self.answered > taken

    def fills(self, step: int) -> bool:
        """Whether this rank has no sample of its own in ``step``, which has been asked for."""
        self._wait(step, None)
        return self._first_filler is not None and step >= self._first_filler

    def settle(self, taken: int) -> None:
        """Wait for what was asked ahead: a rank that left before would keep the others waiting."""
        if taken:
            self._wait(taken, _SETTLE_S)

    def _wait(self, taken: int, timeout: float | None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self.answered > taken or self._ended or self.failure is not None, timeout=timeout
            )


class StreamInEpochs(InEpochs):
    """The part of a stream's loader that knows no framework. Every pass over it is a collective.

    Attributes:
        share: which samples are this rank's.
    """

    share: StreamShare  # type: ignore[assignment]
    in_fit = False
    _uncounted = (
        "the position in this stream is unknown, because its iterator went into a tf.function; loop over it outside, "
        "or give it to hvdkit.keras' fit."
    )

    def _begin_stream(self, share: StreamShare, totals: Callable[[str], Total]) -> None:
        self.share, self._totals = share, totals
        self._passes = Passes(StreamPosition())
        self._name, self._numbers = f"hvdkit.stream.{next(_streams)}", itertools.count()
        self._looks = itertools.count()

    def _begin_pass(self) -> tuple[Pass, int]:
        begun, number = self._passes.begin(self._next, self.share), next(self._numbers)
        begun.exchange = StreamExchange(self._totals(f"{self._name}.{number}"), self.share, begun.start)
        if self.in_fit:
            self._passes.in_fit = begun
        return begun, number

    def _reached(self, one: Pass) -> StreamPosition:
        start: StreamPosition = one.start
        if not one.reached:
            return start
        here = start.after(self.share, one.reached)
        if not one.is_counted or (one.reached == one.taken and not one.exchange.goes_on_after(one.taken)):
            return here.next_epoch()
        return replace(here, order=one.exchange.order)

    # What Keras' fit asks, where its guard counts the steps and not the iterator.

    @property
    def steps_done(self) -> int:
        """Steps of the next pass that were taken before this process went on in mid-epoch."""
        return self._next.samples // self.share.global_batch

    def advance(self, steps: int) -> None:
        """Count steps that were trained in the pass that is under way."""
        passes.go_on_elsewhere()
        under_way = self._passes.in_fit
        if under_way is not None:  # several steps in one execution can be more than there were
            under_way.train(min(steps, under_way.exchange.answered - under_way.taken))

    def fills(self, batch: int) -> bool:
        """Whether this rank has no sample of its own in a batch of the epoch, where that can be known."""
        under_way = self._passes.in_fit
        if under_way is None or not under_way.taken:
            return False
        return bool(under_way.exchange.fills(batch - under_way.start.samples // self.share.global_batch))

    def goes_on(self) -> bool:
        """Whether the pass that is under way has a step after those that were trained; True before the first."""
        under_way = self._passes.in_fit
        return under_way is None or not under_way.taken or under_way.exchange.goes_on_after(under_way.taken)
