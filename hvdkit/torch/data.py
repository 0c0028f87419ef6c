"""This rank's part of a data set: the inside of ``hvdkit.torch.shard``."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import operator
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdkit.errors import DataError, InvalidArgumentError, name_ranks
from hvdkit.steps import random_state
from hvdkit.steps.numbers import whole
from hvdkit.steps.same_data import fingerprint, require_same_data
from hvdkit.steps.seeds import integer, seed_python
from hvdkit.steps.shards import Batch, Indices, InEpochs, Position, Shard, require_loader, stream_weights
from hvdkit.steps.topology import Topology
from hvdkit.torch import seeds
from hvdkit.torch.from_loader import Wanted
from hvdkit.torch.state import RANKS
from hvdkit.torch.stream_sources import EVERY_NTH, known_rank, this_ranks_part

_INSTEAD = {
    "batch_sampler": "shard makes the batches; give what draws the samples as sampler=",
    "drop_last": "say what becomes of the last partial batch with remainder=",
}

_MOST_DRAWS = 2**31  # without an end, as in minGPT's num_samples=int(1e10), they would fill the memory


def sharded(world: Topology, seed: int, wanted: Wanted) -> ShardedLoader | ShardedStream:
    """The inside of ``hvdkit.torch.shard``."""
    for name, instead in _INSTEAD.items():
        if name in wanted.options:
            raise InvalidArgumentError(f"shard takes no {name}: {instead}.")
    dataset, sampler, batch_size, remainder = wanted.dataset, wanted.sampler, wanted.batch_size, wanted.remainder
    if isinstance(dataset, torch.utils.data.IterableDataset):
        if sampler is not None:
            raise InvalidArgumentError("an IterableDataset decides its order itself; leave sampler out.")
        return ShardedStream(this_ranks_part(dataset, world), world, batch_size, remainder, **wanted.options)
    samples = _length(dataset) if sampler is None else _draws(sampler)
    for held in (dataset, *([] if sampler is None else [sampler])):  # before an error of this rank alone
        require_same_data(RANKS, world, held)
    order = (samples, world, batch_size, remainder, wanted.shuffle, seed)
    share = Shard(*order) if sampler is None else SampledShard(*order, sampler=sampler)
    return ShardedLoader(dataset, share, **wanted.options)


def _length(dataset: Any) -> int:
    if hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        raise InvalidArgumentError(
            f"shard picks samples by their index, and {type(dataset).__name__} can only be iterated. {EVERY_NTH}"
        )
    rows = {tuple(getattr(part, "shape", ()))[:1] for part in dataset} if isinstance(dataset, tuple) else {()}
    if len(rows) == 1 and () not in rows and len(dataset) < 4:
        raise InvalidArgumentError(
            f"shard got a tuple of {len(dataset)} arrays, which PyTorch takes for {len(dataset)} samples; give it "
            "torch.utils.data.TensorDataset(*map(torch.as_tensor, arrays))."
        )
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

    def identity(self) -> dict[str, Any]:
        """As of ``Shard``: the sampler shuffles."""
        return {**Shard.identity(self), "sampler": type(self.sampler).__name__, "shuffle": None}

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


def _with_weights_of_1(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return with_weight(collate(samples), 1.0, len(samples))


class ShardedLoader(InEpochs, torch.utils.data.DataLoader[Any]):
    """This rank's part of every global batch; a new order in each epoch. Made by ``hvdkit.torch.shard``.

    Attributes:
        share: which samples are this rank's.
    """

    def __init__(self, dataset: torch.utils.data.Dataset[Any], share: Shard, **options: Any) -> None:
        self._begin(share)
        self._batches = EpochBatches(share)
        self._given_generator, self._options = options.get("generator"), options
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
                f"which {self._next.samples} were taken; restore the data, too, or restore without the loader and call "
                f"set_epoch({self._next.epoch}), which begins the epoch anew."
            )
        return replace(self.share, n_samples=samples)

    def evaluation(self) -> torch.utils.data.DataLoader[Any]:
        """A ``DataLoader`` of this rank's batches of an evaluation: each sample once on all ranks together, in order.

        The order is that of the data set or, where one was given, of the sampler. Batches are as in training, with
        "exact" of weight 1, and dealt out one by one; a rank may have one less than another. No position moves.
        """
        options, share = dict(self._options), self._next_share()
        if share.remainder == "exact":
            collate = options.get("collate_fn") or torch.utils.data.default_collate
            options["collate_fn"] = functools.partial(_with_weights_of_1, collate)
        if self._given_generator is None:
            options["generator"] = seeds.workers_generator(0)
        batches = [indices.tolist() for indices in share.once()]
        return torch.utils.data.DataLoader(self.dataset, batch_sampler=batches, **options)

    def __len__(self) -> int:
        return len(self._next_share())

    def __iter__(self) -> Any:
        self._set_share(self._next_share())
        begun = self._passes.begin(self._next, self.share)
        self._batches.position = begun.start
        if self._given_generator is None:
            self.generator = seeds.workers_generator(begun.start.epoch)
        # For the rest of an epoch the workers' seed was drawn before, when it began.
        with torch.random.fork_rng(devices=(), enabled=begun.start.samples > 0):
            batches: Iterable[Any] = super().__iter__()
        if self.share.remainder == "exact":
            pairs = zip(batches, self._batches.plan(), strict=True)
            batches = (with_weight(contents, batch.weight, len(batch.indices)) for contents, batch in pairs)
        return begun.counting(batches, lambda: not torch.is_grad_enabled())


_NO_MARKS = np.zeros((0, 2), dtype=np.int64)
_MOST_MARKS, _FEW_MARKS = 2**17, 16
"""Fingerprints of all ranks that are compared, and up to which two equal ones may be chance within an epoch."""


class _Counted:
    """A ``collate_fn`` that also says of how many samples the batch is, whatever its form, and their fingerprints.

    Attributes:
        marked: how many more samples get a fingerprint in this process.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate, self.marked = collate, 2**13

    def __call__(self, samples: list[Any]) -> tuple[int, Any, Any]:
        worker = torch.utils.data.get_worker_info()
        marks = [(worker.id if worker else 0, fingerprint(one)) for one in samples[: self.marked]]
        self.marked -= len(marks)
        return len(samples), np.array(marks, dtype=np.int64).reshape(-1, 2), self._collate(samples)


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
    def ask(self, size: int) -> None:
        mine = torch.tensor([size], dtype=torch.int64)
        self._unread[self._name] = hvd.allgather_async(mine, name=self._name)

    @torch.inference_mode(False)
    def answers(self) -> list[int]:
        sizes: list[int] = hvd.synchronize(self._unread.pop(self._name)).tolist()
        return sizes


class _Copies:
    """Warns where several ranks or DataLoader workers read the same samples, since each reads the stream as a whole."""

    def __init__(self) -> None:
        self._warned = False
        self._compare_at: float = 0  # step of a pass; never again after a complete one

    def begin(self) -> None:
        """A pass begins; in another one a sample may be another rank's."""
        self._marks = [_NO_MARKS]
        self._compare_at = 0 if self._compare_at < math.inf else math.inf

    def add(self, marks: Any) -> None:
        """Note what this rank has read: the worker that read a sample, and its fingerprint, int64 (m, 2)."""
        if self._compare_at < math.inf:
            self._marks.append(marks)

    def compare(self, step: int, *, ended: bool) -> None:
        """What all ranks have read, now and then in the first complete pass, and at its end; a collective."""
        if step != self._compare_at and not (ended and self._compare_at < math.inf):
            return
        self._compare_at = math.inf if ended else 4 * step + 1
        mine = np.concatenate(self._marks)[: max(64, _MOST_MARKS // hvd.size())]
        mine = np.insert(mine, 0, hvd.rank(), axis=1)[mine[:, 1] > 0]
        read = np.concatenate(RANKS.allgather(mine, "hvdkit.stream.copies"))
        by_reader, readers = np.unique(read, axis=0), len(np.unique(read[:, :2], axis=0))
        several, again = len(by_reader) - len(np.unique(by_reader[:, 2])), len(read) - len(by_reader)
        # Data that repeat themselves do so within each reader, too; what is drawn with replacement repeats a little.
        copied = 5 * several >= len(read) > 0 and several > 4 * readers * again
        if hvd.rank() == 0 and not self._warned and copied and (ended or len(read) > _FEW_MARKS):
            self._warned = True
            warnings.warn(
                f"{several} of the {len(read)} samples that were read had been read by another rank or DataLoader "
                "worker: the training sees copies; yield only the part of world.rank and "
                "torch.utils.data.get_worker_info(), with webdataset nodesplitter=wds.split_by_node.",
                stacklevel=4,
            )


class ShardedStream:
    """Batches of this rank's own stream, the same number on every rank. Made by ``hvdkit.torch.shard``.

    Before each step the ranks tell each other how many samples they have for it, while the step before computes.

    Attributes:
        dataset, batch_size, num_workers: as of a ``DataLoader``. It has no length: no rank knows that of the others.
    """

    def __init__(
        self,
        dataset: torch.utils.data.IterableDataset[Any],
        world: Topology,
        batch_size: int,
        remainder: str,
        **options: Any,
    ) -> None:
        batch_size = whole("batch_size", batch_size, 1)
        if remainder not in ("drop", "exact"):
            raise InvalidArgumentError(
                f"remainder must be drop or exact for a data set of unknown length, got {remainder!r}."
            )
        self._collate = _Counted(options.pop("collate_fn", None) or torch.utils.data.default_collate)
        # A worker's short last batch is no end of the stream: other workers still have batches.
        options["drop_last"] = remainder == "drop"
        self._loader = torch.utils.data.DataLoader(dataset, batch_size, collate_fn=self._collate, **options)
        self._remainder, self._world = remainder, world
        self._copies = _Copies()
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, self._loader.num_workers

    def __iter__(self) -> Iterator[Any]:
        with _Sizes() as asked:
            yield from self._steps(asked)

    def _steps(self, asked: _Sizes) -> Iterator[Any]:
        """The batches of a pass, as the ranks agree on each."""
        batches = itertools.chain(self._loader, itertools.repeat((0, _NO_MARKS, None)))
        self._copies.begin()
        size, contents = self._next(batches, asked)
        filler: tuple[int, Any] = 0, None
        for step in itertools.count():
            sizes = asked.answers()
            self._require(sizes, contents, first=step == 0)
            weights = stream_weights(sizes, self.batch_size, self._remainder)
            self._copies.compare(step, ended=weights is None)
            if weights is None:
                self._collate.marked = 0
                return
            count, batch = (size, contents) if size else (filler[0], copy.deepcopy(filler[1]))
            size, contents = self._next(batches, asked)
            if self._remainder == "drop":
                yield batch
                continue
            if size == 0 and filler[0] == 0:
                filler = count, copy.deepcopy(batch)  # the loop may change what it gets
            yield with_weight(batch, weights[hvd.rank()], count)

    def _next(self, batches: Iterator[Any], asked: _Sizes) -> tuple[int, Any]:
        try:
            with known_rank(self._world):
                size, marks, contents = next(batches)
            self._copies.add(marks)
        except Exception as error:
            # A ring of the error and the frames that it came through would hold the loader, and PyTorch waits 5 s for
            # each worker of one that is collected so: no variable of a frame holds the error.
            if self.num_workers:
                traceback.clear_frames(error.__traceback__)
            size, contents = -1, [error]
        asked.ask(size)
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
