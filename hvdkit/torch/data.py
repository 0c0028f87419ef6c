"""This rank's part of a data set: step 7."""

from __future__ import annotations

import contextlib
import functools
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.same_data import require_same_data
from hvdkit.steps.seeds import capture_state, integer, restore_state, seed_python
from hvdkit.steps.shards import Batch, Indices, InEpochs, Position, Shard, require_loader
from hvdkit.steps.topology import Topology
from hvdkit.torch import seeds
from hvdkit.torch.state import RANKS, tensorflow_at_work
from hvdkit.torch.streams import EVERY_NTH, ShardedStream, this_ranks_part, with_weight

_INSTEAD = {
    "batch_sampler": "shard makes the batches; give what draws the samples as sampler=",
    "drop_last": "say what becomes of the last partial batch with remainder=",
}

_MOST_DRAWS = 2**31  # without an end, as in minGPT's num_samples=int(1e10), they would fill the memory


def shard(
    dataset: torch.utils.data.Dataset[Any],
    world: Topology,
    batch_size: int,
    *,
    remainder: str = "drop",
    shuffle: bool = True,
    seed: int = 0,
    sampler: Iterable[int] | None = None,
    **loader_options: Any,
) -> Any:
    """A ``DataLoader`` over this rank's part of the data set (step 7). Every rank calls it, as a collective.

    Args:
        dataset: map-style, with a length, the same on every rank; between epochs it may grow or shrink, alike on all.
            Or an ``IterableDataset`` of unknown length that yields this rank's own samples: every rank then takes the
            same number of steps, until the first rank cannot fill a batch ("drop") or until no rank has a sample left
            ("exact"); seed and shuffle are its own affair. HuggingFace's ``IterableDataset`` is dealt out to the ranks,
            and while one is read RANK and WORLD_SIZE are set, which webdataset's ``split_by_node`` asks for.
        world: the job; rank and size are used.
        batch_size: samples per step on one rank.
        remainder: what becomes of an epoch's last partial batch, see ``Shard``: "drop", "pad", or "exact", with which
            each batch is ``(x, y, w)``, w float64 (m,), for ``weighted_loss``; a batch that is no plain tuple or list
            but a tensor, dict, named tuple or object is ``(batch, w)``.
        shuffle: draw a new order each epoch, without any call; ``set_epoch`` exists to resume.
        seed: of the order, the same on every rank.
        sampler: what draws the order in the place of ``shuffle``, such as ``WeightedRandomSampler``, for the whole
            data set, all ranks together: its length is that of an epoch. See ``SampledShard``.
        loader_options: for ``DataLoader``: ``num_workers``, ``pin_memory``, ``collate_fn``, ...
    Raises:
        InvalidArgumentError: a data set or sampler without length, bad numbers, or an option that shard decides; over a
            stream, on every rank: one that is empty or, with "drop", fills no batch on some rank.
        AgreementError: the ranks' data sets hold other lists, arrays or tables; raised on every rank.
        DataError: over a stream: the data set of another rank raised an error.
    """
    if not hvd.is_initialized() and tensorflow_at_work() is not None:
        raise InvalidArgumentError(
            "shard of hvdkit.torch was called where hvdkit.tensorflow, or hvdkit.keras on its tensorflow backend, has "
            "connected the ranks; give that one's shard arrays or a tf.data.Dataset, or set KERAS_BACKEND=torch."
        )
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise InvalidArgumentError(
            f"shard makes the loader, and got a {type(dataset).__name__}; give it the data set and the loader's "
            "options: shard(loader.dataset, world, batch_size, num_workers=..., collate_fn=...)."
        )
    for name, instead in _INSTEAD.items():
        if name in loader_options:
            raise InvalidArgumentError(f"shard takes no {name}: {instead}.")
    if isinstance(dataset, torch.utils.data.IterableDataset):
        if sampler is not None:
            raise InvalidArgumentError("an IterableDataset decides its order itself; leave sampler out.")
        return ShardedStream(this_ranks_part(dataset, world), world, batch_size, remainder, **loader_options)
    samples = _length(dataset) if sampler is None else _draws(sampler)
    for held in (dataset, *([] if sampler is None else [sampler])):  # before an error of this rank alone
        require_same_data(RANKS, world, held)
    order = (samples, world, batch_size, remainder, shuffle, seed)
    share = Shard(*order) if sampler is None else SampledShard(*order, sampler=sampler)
    return ShardedLoader(dataset, share, **loader_options)


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
        """The indices that the sampler draws for ``epoch``, int64 (n_samples,)."""
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
    python, states = capture_state(), [generator.get_state() for generator in generators]
    seed_python(stream)
    for generator in generators:
        generator.manual_seed(integer(stream, bits=63))
    try:
        yield
    finally:
        restore_state(python)
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


_MADE = "what shard made of a map-style data set"  # a stream of unknown length has no position
require_sharded = functools.partial(require_loader, kinds=(ShardedLoader,), made=_MADE)
