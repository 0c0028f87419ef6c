"""This rank's part of a data set: the inside of ``hvdkit.torch.shard``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import horovod.torch as hvd
import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.ranks import name_ranks
from hvdkit.steps.shards import Batch, InEpochs, Position, Shard, stream_weights
from hvdkit.torch import seeds


class EpochBatches(torch.utils.data.Sampler[list[int]]):
    """A batch sampler whose every iteration is the next epoch of a ``Shard``, or the rest of one."""

    def __init__(self, share: Shard) -> None:
        self.share = share
        self.position = Position()

    def plan(self) -> Iterator[Batch]:
        """The batches of the next iteration."""
        return self.share.batches(self.position.epoch, self.position.samples)

    def __len__(self) -> int:
        return self.share.steps_left(self.position.samples)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.indices.tolist() for batch in self.plan())


def with_weights(batches: Iterable[Any], plan: Iterable[Batch]) -> Iterator[Any]:
    """Append to each batch its per-sample weights."""
    for contents, batch in zip(batches, plan, strict=True):
        yield with_weight(contents, batch.weight, len(batch.indices))


def with_weight(contents: Any, weight: float, samples: int | None = None) -> Any:
    """A batch and its samples' weights, float64 (m,): a float32 cannot hold 6/5."""
    weights = torch.full((_samples(contents) if samples is None else samples,), weight, dtype=torch.float64)
    return (*contents, weights) if isinstance(contents, (list, tuple)) else (contents, weights)


class ShardedLoader(InEpochs, torch.utils.data.DataLoader[Any]):
    """This rank's part of every global batch; a new order in each iteration. Made by ``hvdkit.torch.shard``.

    Attributes:
        share: which samples are this rank's.
        position: how far the training has come in its data, all ranks together.
    """

    def __init__(self, dataset: torch.utils.data.Dataset[Any], share: Shard, **options: Any) -> None:
        self._begin(share)
        self._batches = EpochBatches(share)
        self._given_generator = options.get("generator")
        super().__init__(dataset, batch_sampler=self._batches, **options)

    def _set_share(self, share: Shard) -> None:
        self.share = self._batches.share = share

    def __len__(self) -> int:
        return self.share.steps_left(self._next.samples)

    def __iter__(self) -> Any:
        start = self._batches.position = self._next
        plan = self._batches.plan()
        if self._given_generator is None:
            self.generator = seeds.workers_generator(start.epoch)
        batches = super().__iter__()
        self._next = Position(start.epoch + 1)
        weighted = with_weights(batches, plan) if self.share.remainder == "exact" else batches
        return self._counted(weighted, start)

    def _counted(self, batches: Iterable[Any], start: Position) -> Iterator[Any]:
        for taken, contents in enumerate(batches, start=1):
            self.position = start.after(self.share, taken)
            yield contents


class ShardedStream:
    """Batches of this rank's own stream, the same number on every rank. Made by ``hvdkit.torch.shard``.

    Before each step the ranks tell each other how many samples they have for it, while the step before computes.
    """

    def __init__(
        self, dataset: torch.utils.data.IterableDataset[Any], batch_size: int, remainder: str, **options: Any
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgumentError(f"batch_size must be an integer >= 1, got {batch_size!r}.")
        if remainder not in ("drop", "exact"):
            raise InvalidArgumentError(
                f"remainder must be drop or exact for a data set of unknown length, got {remainder!r}."
            )
        self._loader = torch.utils.data.DataLoader(dataset, batch_size, **options)
        self._batch_size, self._remainder = batch_size, remainder

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        last, (contents, size, waiting) = None, self._next(batches)
        while True:
            sizes = hvd.synchronize(waiting).tolist()
            weights = stream_weights(sizes, self._batch_size, self._remainder)
            if weights is None:
                return
            if last is None and 0 in sizes:
                empty = name_ranks([rank for rank, one in enumerate(sizes) if one == 0])
                raise InvalidArgumentError(f"the data set of {empty} is empty; give every rank at least one sample.")
            last = contents if size else _first_sample(last)
            ahead = self._next(batches)
            yield last if self._remainder == "drop" else with_weight(last, weights[hvd.rank()])
            contents, size, waiting = ahead

    def _next(self, batches: Iterator[Any]) -> tuple[Any, int, int]:
        contents = next(batches, None)
        size = 0 if contents is None else _samples(contents)
        mine = torch.tensor([size], dtype=torch.int64)
        return contents, size, hvd.allgather_async(mine, name="hvdkit.stream")


def _parts(contents: Any) -> list[Any]:
    return list(contents) if isinstance(contents, (list, tuple)) else [contents]


def _samples(contents: Any) -> int:
    return len(_parts(contents)[0])


def _first_sample(contents: Any) -> Any:
    return tuple(part[:1] for part in _parts(contents))


def require_sharded(loader: Any) -> ShardedLoader:
    """The loader of ``shard``.

    Raises:
        InvalidArgumentError: something else; a stream of unknown length has no position.
    """
    if not isinstance(loader, ShardedLoader):
        raise InvalidArgumentError(
            f"loader must be what shard made of a map-style data set, got {type(loader).__name__}."
        )
    return loader
