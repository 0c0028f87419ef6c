"""This rank's part of a data set: the inside of ``hvdkit.torch.shard``."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.steps import random_state
from hvdkit.steps.numbers import whole
from hvdkit.steps.ranks import name_ranks
from hvdkit.steps.seeds import integer, seed_python
from hvdkit.steps.shards import Batch, Indices, InEpochs, Position, Shard, require_loader, stream_weights
from hvdkit.steps.topology import Topology
from hvdkit.torch import seeds

_INSTEAD = {
    "batch_sampler": "shard makes the batches; give what draws the samples as sampler=",
    "drop_last": "say what becomes of the ragged end with remainder=",
}

_MOST_DRAWS = 2**31  # without an end, as in minGPT's num_samples=int(1e10), they would fill the memory


def sharded(
    dataset: Any,
    world: Topology,
    batch_size: int,
    remainder: str,
    *,
    sampler: Any,
    options: dict[str, Any],
    **order: Any,
) -> ShardedLoader | ShardedStream:
    """The inside of ``hvdkit.torch.shard``; ``order``: shuffle and seed."""
    for name, instead in _INSTEAD.items():
        if name in options:
            raise InvalidArgumentError(f"shard takes no {name}: {instead}.")
    if isinstance(dataset, torch.utils.data.IterableDataset):
        if sampler is not None:
            raise InvalidArgumentError("an IterableDataset decides its order itself; leave sampler out.")
        return ShardedStream(dataset, batch_size, remainder, **options)
    if sampler is None:
        share = Shard(_length(dataset), world, batch_size, remainder, **order)
    else:
        share = SampledShard(_draws(sampler), world, batch_size, remainder, **order, sampler=sampler)
    return ShardedLoader(dataset, share, **options)


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        raise InvalidArgumentError(
            f"shard needs a data set with a length, got {type(dataset).__name__}; give it a __len__, or shard "
            "torch.utils.data.Subset(dataset, range(n)); a stream is a torch.utils.data.IterableDataset."
        ) from None


def _draws(sampler: Any) -> int:
    if hasattr(sampler, "num_replicas"):
        raise InvalidArgumentError(
            f"{type(sampler).__name__} gives each rank a part, and shard would give a part of that; leave it out: "
            "shard has shuffle, seed and, for drop_last, remainder."
        )
    try:
        draws = len(sampler)
    except (TypeError, NotImplementedError):
        raise InvalidArgumentError(
            f"shard needs a sampler with a length, got {type(sampler).__name__}; give it a __len__: the number of "
            "samples that it draws for an epoch."
        ) from None
    if draws > _MOST_DRAWS:
        raise InvalidArgumentError(
            f"{type(sampler).__name__} draws {draws} samples for an epoch, whose order is held in memory; let it draw "
            f"fewer, at most {_MOST_DRAWS}, and loop over the loader again for the next epoch."
        )
    return draws


@dataclass(frozen=True, slots=True)
class SampledShard(Shard):
    """A share of what a sampler draws for each epoch, in the place of ``shuffle``.

    All ranks draw with the same random numbers, which depend on seed and epoch alone, so that a training goes on in the
    same order on any number of ranks.

    Args:
        sampler: yields ``n_samples`` indices. What it draws from ``random``, NumPy's and PyTorch's global generators
            and its own ``generator`` is the same on every rank; another source must be seeded alike.
    """

    sampler: Any = ()

    def order(self, epoch: int) -> Indices:
        """The indices that the sampler draws for ``epoch``, int64 (n_samples,).

        Raises:
            InvalidArgumentError: a negative epoch, something else than indices, or not as many as its length.
        """
        with _drawing_alike(np.random.SeedSequence([self.seed, epoch]), getattr(self.sampler, "generator", None)):
            drawn = list(self.sampler)
        name = type(self.sampler).__name__
        try:
            order = np.array([operator.index(one) for one in drawn], dtype=np.int64)
        except TypeError:
            raise InvalidArgumentError(f"sampler must yield indices, got {drawn[0]!r} from {name}.") from None
        if len(order) != self.n_samples:
            raise InvalidArgumentError(f"{name} drew {len(order)} samples, its length is {self.n_samples}.")
        return order

    def facts(self, epoch: int) -> dict[str, float]:
        """As of ``Shard``, and a checksum of the order."""
        return {**Shard.facts(self, epoch), "loader.order": float(zlib.crc32(self.order(epoch).tobytes()))}


@contextlib.contextmanager
def _drawing_alike(stream: np.random.SeedSequence, own: Any) -> Iterator[None]:
    generators = [torch.default_generator, *([own] if isinstance(own, torch.Generator) else [])]
    python, states = random_state.capture(), [generator.get_state() for generator in generators]
    seed_python(stream)
    for generator in generators:
        generator.manual_seed(integer(stream, bits=63))
    try:
        yield
    finally:
        random_state.restore(python)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


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


def with_weight(contents: Any, weight: float, samples: int) -> Any:
    """A batch and its samples' weights, float64 (m,): a float32 cannot hold 6/5.

    A plain tuple or list becomes ``(x, y, w)``; all else (a tensor, dict, named tuple, object) ``(batch, w)``.
    """
    weights = torch.full((samples,), weight, dtype=torch.float64)
    return (*contents, weights) if type(contents) in (list, tuple) else (contents, weights)


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
        self.__dict__["batch_size"] = share.batch_size  # PyTorch has None beside a batch_sampler

    def _set_share(self, share: Shard) -> None:
        self.share = self._batches.share = share

    def _next_share(self) -> Shard:
        """The share of the next iteration: between epochs a data set may grow or shrink."""
        samples = _draws(self.share.sampler) if isinstance(self.share, SampledShard) else _length(self.dataset)
        if samples == self.share.n_samples:
            return self.share
        if self._next.samples:
            raise InvalidArgumentError(
                f"the data set has {samples} samples now and had {self.share.n_samples} when this epoch began, of "
                f"which {self._next.samples} were taken; restore the data, too, or begin the epoch anew with set_epoch."
            )
        return replace(self.share, n_samples=samples)

    def __len__(self) -> int:
        return self._next_share().steps_left(self._next.samples)

    def __iter__(self) -> Any:
        self._set_share(self._next_share())
        start = self._batches.position = self._next
        if self._given_generator is None:
            self.generator = seeds.workers_generator(start.epoch)
        batches: Iterable[Any] = super().__iter__()
        self._next = Position(start.epoch + 1)
        if self.share.remainder == "exact":
            pairs = zip(batches, self._batches.plan(), strict=True)
            batches = (with_weight(contents, batch.weight, len(batch.indices)) for contents, batch in pairs)
        return self._counted(batches, start)

    def _counted(self, batches: Iterable[Any], start: Position) -> Iterator[Any]:
        for taken, contents in enumerate(batches, start=1):
            self.position = start.after(self.share, taken)
            yield contents


def _counted(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[int, Any]:
    """A ``collate_fn`` that also says of how many samples the batch is, whatever its form."""
    return len(samples), collate(samples)


class _Sizes:
    """What each rank says of its next batch, asked under a name that no other stream in use has."""

    _used: ClassVar[set[str]] = set()
    _unread: ClassVar[dict[str, int]] = {}  # by name: the answers to what was asked in a loop that was left

    def __enter__(self) -> _Sizes:
        names = (f"hvdkit.stream.{number}" for number in itertools.count())
        self._name = next(name for name in names if name not in self._used)
        self._used.add(self._name)
        with contextlib.suppress(KeyError, HorovodInternalError):  # of a Horovod that was started anew since
            hvd.synchronize(self._unread.pop(self._name))
        return self

    def __exit__(self, *_: object) -> None:
        self._used.discard(self._name)

    @torch.inference_mode(False)
    def ask(self, size: int, mark: int) -> None:
        mine = torch.tensor([[size, mark]], dtype=torch.int64)
        self._unread[self._name] = hvd.allgather_async(mine, name=self._name)

    @torch.inference_mode(False)
    def answers(self) -> tuple[list[int], list[int]]:
        sizes, marks = hvd.synchronize(self._unread.pop(self._name)).T.tolist()
        return sizes, marks


class _Copies:
    """Warns where ranks or DataLoader workers begin with the same batch, since each reads the stream as a whole.

    Args:
        workers: of a rank; its first batches come from one after the other.
    """

    def __init__(self, workers: int) -> None:
        self._left = max(1, workers)
        self._seen: set[int] = set()

    def mark(self, contents: Any) -> int:
        """A checksum of a first batch; 0 of a later one, or where all numbers are equal, as in synthetic data."""
        self._left -= 1
        mark = 0
        for tensor in _tensors(contents) if self._left >= 0 else ():
            numbers = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            if bool((numbers != numbers[:1]).any()):
                mark = zlib.crc32(numbers.view(torch.uint8).numpy().tobytes(), mark)
        return mark

    def compare(self, marks: list[int]) -> None:
        """The marks of all ranks for one step."""
        found = [mark for mark in marks if mark]
        if hvd.rank() == 0 and (len(set(found)) < len(found) or self._seen.intersection(found)):
            warnings.warn(
                "the stream begins with the same batch on several ranks or DataLoader workers: the training sees "
                "copies; yield only the part of world.rank and torch.utils.data.get_worker_info().",
                stacklevel=4,
            )
        self._seen.update(found)


def _tensors(contents: Any) -> Iterator[torch.Tensor]:
    if type(contents) is torch.Tensor:
        if contents.layout == torch.strided and contents.device.type == "cpu" and not contents.is_nested:
            yield contents
    elif isinstance(contents, (list, tuple, Mapping)):
        for part in contents.values() if isinstance(contents, Mapping) else contents:
            yield from _tensors(part)


class ShardedStream:
    """Batches of this rank's own stream, the same number on every rank. Made by ``hvdkit.torch.shard``.

    Before each step the ranks tell each other how many samples they have for it, while the step before computes.

    Attributes:
        dataset, batch_size, num_workers: as of a ``DataLoader``. It has no length: no rank knows that of the others.
    """

    def __init__(
        self, dataset: torch.utils.data.IterableDataset[Any], batch_size: int, remainder: str, **options: Any
    ) -> None:
        batch_size = whole("batch_size", batch_size, 1)
        if remainder not in ("drop", "exact"):
            raise InvalidArgumentError(
                f"remainder must be drop or exact for a data set of unknown length, got {remainder!r}."
            )
        collate = functools.partial(_counted, options.pop("collate_fn", None) or torch.utils.data.default_collate)
        # A worker's short last batch is no end of the stream: other workers still have batches.
        options["drop_last"] = remainder == "drop"
        self._loader = torch.utils.data.DataLoader(dataset, batch_size, collate_fn=collate, **options)
        self._remainder = remainder
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, self._loader.num_workers

    def __iter__(self) -> Iterator[Any]:
        with _Sizes() as asked:
            yield from self._steps(asked)

    def _steps(self, asked: _Sizes) -> Iterator[Any]:
        batches, copies = itertools.chain(self._loader, itertools.repeat((0, None))), _Copies(self._loader.num_workers)
        size, contents = self._next(batches, asked, copies)
        filler: tuple[int, Any] = 0, None
        for step in itertools.count():
            sizes, marks = asked.answers()
            self._require(sizes, contents, first=step == 0)
            copies.compare(marks)
            weights = stream_weights(sizes, self.batch_size, self._remainder)
            if weights is None:
                return
            count, batch = (size, contents) if size else (filler[0], copy.deepcopy(filler[1]))
            size, contents = self._next(batches, asked, copies)
            if self._remainder == "drop":
                yield batch
                continue
            if size == 0 and filler[0] == 0:
                filler = count, copy.deepcopy(batch)  # the loop may change what it gets
            yield with_weight(batch, weights[hvd.rank()], count)

    def _next(self, batches: Iterator[tuple[int, Any]], asked: _Sizes, copies: _Copies) -> tuple[int, Any]:
        try:
            size, contents = next(batches)
        except Exception as error:
            # A ring of the error and the frames that it came through would hold the loader, and PyTorch waits 5 s for
            # each worker of one that is collected so: no variable of a frame holds the error.
            if self.num_workers:
                traceback.clear_frames(error.__traceback__)
            size, contents = -1, [error]
        asked.ask(size, copies.mark(contents))
        return size, contents

    def _require(self, sizes: list[int], contents: Any, *, first: bool) -> None:
        failed = [rank for rank, size in enumerate(sizes) if size < 0]
        if hvd.rank() in failed:
            raise contents.pop()
        if failed:
            raise DataError(f"the data set of {name_ranks(failed)} raised an error, which that rank shows.")
        empty = [rank for rank, size in enumerate(sizes) if size == 0]
        if first and empty and self._remainder == "exact":
            raise InvalidArgumentError(
                f"the data set of {name_ranks(empty)} is empty; give every rank at least one sample."
            )
        if first and empty:
            raise InvalidArgumentError(
                f"the data set of {name_ranks(empty)} does not fill one batch of {self.batch_size}; each DataLoader "
                "worker fills batches of its own. Use smaller batches, fewer workers or remainder='exact'."
            )


_MADE = "what shard made of a map-style data set"  # a stream of unknown length has no position
require_sharded = functools.partial(require_loader, kinds=(ShardedLoader,), made=_MADE)
