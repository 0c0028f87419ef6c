"""Steps 7 and 8: which samples each rank trains on, and with what weight; the number of steps in an epoch.

In every epoch all ranks draw the same order of the whole data set. Global step s takes the next
batch_size * size samples of that order and rank k the k-th part of them, so that n ranks see in one step exactly
what one process with the n-fold batch would see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.errors import CheckpointError, InvalidArgumentError, whole
from hvdkit.steps.passes import Pass, Passes
from hvdkit.steps.topology import Topology

Indices = npt.NDArray[np.int64]
REMAINDERS = ("drop", "pad", "exact")


def steps_per_epoch(n_samples: int, batch_size: int, world: Topology, remainder: str = "drop") -> int:
    """Steps (global batches) in one epoch (step 8); equal on every rank, whatever the remainder.

    Args:
        n_samples: samples in the whole data set, before sharding, >= 1.
        batch_size: samples per step on one rank, >= 1.
        world: the job; only ``size`` is used.
        remainder: "drop" leaves the last partial batch of the epoch out, "pad" and "exact" take one more step for it.
    Returns:
        floor(n_samples / (batch_size * size)) for "drop", else the ceiling.
    Raises:
        InvalidArgumentError: a number that is not a positive integer, an unknown policy, or "drop" with fewer
            samples than one global batch (no step would be left).
    """
    n_samples, batch_size = whole("n_samples", n_samples, 1), whole("batch_size", batch_size, 1)
    if remainder not in REMAINDERS:
        raise InvalidArgumentError(f"remainder must be one of {', '.join(REMAINDERS)}, got {remainder!r}.")
    global_batch = batch_size * world.size
    if remainder != "drop":
        return -(-n_samples // global_batch)
    if n_samples < global_batch:
        raise InvalidArgumentError(
            f"{n_samples} samples are fewer than one global batch of {batch_size} x {world.size} ranks, so "
            "remainder='drop' leaves no step; use a smaller batch_size or remainder='exact'."
        )
    return n_samples // global_batch


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a global step.

    Attributes:
        indices: int64 (m,), samples of the data set.
        weight: what each of these samples counts in the mean over the global batch: m_k * n / m with
            remainder="exact" (0 for a filler), else 1.
    """

    indices: Indices
    weight: float


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's share of a data set of ``n_samples``, epoch by epoch (step 7).

    Args:
        n_samples: samples in the whole data set.
        world: the job; rank and size are used.
        batch_size: samples per step on one rank.
        remainder: what becomes of the last partial batch. "drop" leaves it out (a different end each epoch);
            "pad" fills the last step with samples from the start of the order; "exact" uses every sample once, split
            as evenly as possible over the ranks, with weights w = m_k * n / m, so that the mean over the ranks of
            the mean of w * loss is the mean over the global batch. A rank without a sample in the last step gets
            one filler of weight 0 and still takes part in every collective.
        shuffle: draw a new order each epoch; else the order of the data set.
        seed: of the order; must be the same on every rank.
    Raises:
        InvalidArgumentError: as ``steps_per_epoch``, or a negative seed.
    """

    n_samples: int
    world: Topology
    batch_size: int
    remainder: str = "drop"
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        steps_per_epoch(self.n_samples, self.batch_size, self.world, self.remainder)
        for name in ("n_samples", "batch_size", "seed"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 0))

    def __len__(self) -> int:
        return self.steps_left()

    def order(self, epoch: int) -> Indices:
        """The order of the whole data set in ``epoch``, int64 (n_samples,): the same on every rank.

        Raises:
            InvalidArgumentError: a negative epoch.
        """
        epoch = whole("epoch", epoch, 0)
        if not self.shuffle:
            return np.arange(self.n_samples, dtype=np.int64)
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, epoch]))
        return generator.permutation(self.n_samples).astype(np.int64, copy=False)

    @property
    def global_batch(self) -> int:
        """Samples per step on all ranks together."""
        return self.batch_size * self.world.size

    def steps_left(self, position: int = 0) -> int:
        """Steps from ``position`` (samples that all ranks have taken of an epoch) to the epoch's end."""
        left = max(0, self.n_samples - position)
        return left // self.global_batch if self.remainder == "drop" else -(-left // self.global_batch)

    def batches(self, epoch: int, position: int = 0) -> Iterator[Batch]:
        """This rank's batches of ``epoch``.

        Args:
            epoch: decides the order.
            position: samples of that order which the ranks, as many as there were, have taken together before; the
                batches go on from there.
        Raises:
            InvalidArgumentError: a negative epoch or position.
        """
        return self._batches(self.order(epoch), whole("position", position, 0))

    def _batches(self, order: Indices, position: int) -> Iterator[Batch]:
        global_batch = self.global_batch
        for step in range(self.steps_left(position)):
            start = position + step * global_batch
            chunk = order[start : start + global_batch]
            if len(chunk) < global_batch and self.remainder == "exact":
                part = np.array_split(chunk, self.world.size)[self.world.rank]
                weight = len(part) * self.world.size / len(chunk)
                yield Batch(part if len(part) else chunk[:1], weight)
                continue
            if len(chunk) < global_batch:
                chunk = np.concatenate([chunk, np.resize(order, global_batch - len(chunk))])
            first = self.world.rank * self.batch_size
            yield Batch(chunk[first : first + self.batch_size], 1.0)

    def once(self) -> list[Indices]:
        """This rank's batches of an evaluation: each sample once on all ranks together, in the data set's order.

        The batches are those of one process, dealt out: batch b is rank ``b % size``'s. A rank may have one less than
        another, or none.
        """
        order, first = replace(self, shuffle=False).order(0), self.world.rank * self.batch_size
        starts = range(first, self.n_samples, self.global_batch)
        return [order[start : start + self.batch_size] for start in starts]

    def facts(self, epoch: int) -> dict[str, float]:
        """What must be the same on every rank, by name, for ``check_agreement``.

        Args:
            epoch: where this rank is.
        """
        numbers = {"epoch": epoch, "n_samples": self.n_samples, "batch_size": self.batch_size, "seed": self.seed}
        choices = {"shuffle": self.shuffle, "remainder": REMAINDERS.index(self.remainder)}
        return {f"loader.{name}": float(value) for name, value in {**numbers, **choices}.items()}

    def identity(self) -> dict[str, Any]:
        """What tells its data and their order from others, for a checkpoint."""
        return {"n_samples": self.n_samples, "seed": self.seed, "sampler": None, "shuffle": self.shuffle}


@dataclass(slots=True)
class Position:
    """Where a training is in its data, counted in samples, so that it means the same for any number of ranks.

    Attributes:
        epoch: the one that is under way, or that is next.
        samples: of the epoch's order, taken by all ranks together.
    """

    epoch: int = 0
    samples: int = 0

    def after(self, share: Shard, step: int) -> Position:
        """The position after ``step`` more steps; a complete epoch is the beginning of the next."""
        samples = min(self.samples + step * share.global_batch, share.n_samples)
        return Position(self.epoch, samples) if share.steps_left(samples) else Position(self.epoch + 1)

    def next_epoch(self) -> Position:
        """The beginning of the next epoch."""
        return Position(self.epoch + 1)

    def state(self, share: Shard) -> dict[str, Any]:
        """The position, counted in samples, as plain values for a checkpoint, with what tells this data and order."""
        counted = {"epoch": self.epoch, "position": self.samples}
        return {**counted, "samples": self.epoch * share.n_samples + self.samples, **share.identity()}

    @classmethod
    def of(cls, state: Mapping[str, Any], share: Shard) -> Position:
        """Where ``state`` was taken, for a share of the same data, on however many ranks that was.

        Raises:
            CheckpointError: it belongs to another data set or order, or is none.
        """
        for name, mine in share.identity().items():
            is_known = name in state or name in ("n_samples", "seed")  # older checkpoints do not say how they shuffle
            if is_known and state.get(name) != mine:
                raise CheckpointError(
                    f"the checkpoint's data had {name}={state.get(name)}, this loader has {mine}; shard the same data "
                    "with the same seed, shuffle and sampler, or restore without the loader."
                )
        epoch, samples = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(samples, int) and min(epoch, samples) >= 0):
            raise CheckpointError(
                f"the checkpoint's position in the data is none: epoch {epoch!r}, sample {samples!r}."
            )
        return cls(epoch, samples).after(share, 0)

    def steps(self, share: Shard) -> int:
        """Steps that lead here from the beginning, with as many ranks as ``share`` has."""
        return self.epoch * len(share) + -(-self.samples // share.global_batch)


class InEpochs:
    """The part of a framework binding's loader that knows no framework: where the training is in its data.

    Attributes:
        share: which samples are this rank's.
    """

    share: Shard
    _passes: Passes
    _uncounted: str
    """What is said of a pass whose batches nobody counts."""

    def _begin(self, share: Shard) -> None:
        self.share = share
        self._passes = Passes(Position())

    @property
    def position(self) -> Position:
        """How far the training has come in its data, all ranks together.

        Raises:
            InvalidArgumentError: (TensorFlow) batches were taken where they cannot be counted.
        """
        current, base = self._passes.current(), self._base
        if current is not None and not current.is_counted:
            raise InvalidArgumentError(self._uncounted)
        return base if current is None else self._reached(current)

    @property
    def _base(self) -> Position:
        base: Position = self._passes.base
        return base

    def _reached(self, one: Pass) -> Position:
        """How far the training has come in a pass, after its end the next one."""
        start: Position = one.start
        return start.next_epoch() if one.has_ended or not one.is_counted else start.after(one.share, one.reached)

    @property
    def _next(self) -> Position:
        """Where the next pass begins."""
        last = self._passes.epoch()
        if last is None:
            return self._base
        here = self._reached(last)
        return here if here.epoch > last.start.epoch else here.next_epoch()

    @property
    def epoch(self) -> int:
        """The epoch that the next pass will be: one more once an optimizer has stepped in this one."""
        return self._next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass ``epoch``: needed only to repeat an order.

        From its beginning, unless the loader goes on in the middle of this epoch: then the rest of it.

        Raises:
            InvalidArgumentError: not an integer >= 0.
        """
        epoch, following = whole("epoch", epoch, 0), self._next
        if (following.epoch, following.samples > 0) != (epoch, True):
            self._go_on_at(type(following)(epoch))

    def state(self) -> dict[str, Any]:
        """The position, counted in samples, for a checkpoint; in an epoch that is under way, after the last step's.

        Raises:
            InvalidArgumentError: (TensorFlow) batches were taken where they cannot be counted, see ``ShardedDataset``.
        """
        return self.position.state(self.share)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, on however many ranks that was.

        What comes before in the epoch of a stream is read again, and not trained on.

        Raises:
            CheckpointError: it belongs to another data set or order, or is none.
        """
        self._go_on_at(self.require_state(state))

    def require_state(self, state: Mapping[str, Any]) -> Position:
        """Where ``state`` was taken; CheckpointError where it belongs to another data set or order, or is none."""
        return type(self._base).of(state, self.share)

    def follow(self, world: Topology) -> None:
        """Go on at the same sample as this rank of another world."""
        position = self.position
        self._set_share(replace(self.share, world=world))
        self._go_on_at(position.after(self.share, 0))

    def _set_share(self, share: Shard) -> None:
        self.share = share

    def _go_on_at(self, position: Position) -> None:
        self._passes.begin_at(position)


def require_loader(loader: Any, kinds: tuple[type, ...], made: str = "what shard returned", instead: str = "") -> Any:
    """The loader of a framework binding's ``shard``.

    Args:
        kinds: its classes.
        made, instead: how they are called, and what to give in the place of others, for the message.
    Raises:
        InvalidArgumentError: something else.
    """
    if not isinstance(loader, kinds):
        raise InvalidArgumentError(f"loader must be {made}, got {type(loader).__name__}{instead}.")
    return loader


def stream_weights(sizes: Sequence[int], batch_size: int, remainder: str) -> list[float] | None:
    """What a sample of each rank counts in one step over streams of unknown length; None when they have ended.

    Args:
        sizes: samples that each rank has left for this step, by rank.
        batch_size: samples per step on one rank.
        remainder: "drop" ends with the first rank that cannot fill a batch, the others when no rank has a sample left.
    """
    if remainder == "drop":
        return [1.0] * len(sizes) if min(sizes) == batch_size else None
    total = sum(sizes)
    if total and remainder == "pad":
        return [1.0] * len(sizes)
    return [size * len(sizes) / total for size in sizes] if total else None
