"""Streams of unknown length: each rank's own samples, and as many steps on every rank; used by ``shard``."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import os
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps

from hvdkit.core.communicator import ALLGATHER, PendingCollective
from hvdkit.errors import DataError, InvalidArgumentError, name_ranks, whole
from hvdkit.steps.same_data import fingerprint, require_same_data
from hvdkit.steps.shards import stream_weights
from hvdkit.steps.topology import Topology
from hvdkit.torch.state import RANKS

EVERY_NTH = (
    "Give shard a torch.utils.data.IterableDataset whose __iter__ is "
    "`return itertools.islice(source, world.rank, None, world.size)`, of a source in the same order on every rank."
)
_NO_MARKS = np.zeros((0, 2), dtype=np.int64)
_MARKED, _COMPARED_AT = 2**10, 32
"""Samples of each process that get a fingerprint, and the step at which all ranks' fingerprints are compared."""


def with_weight(contents: Any, weight: float, samples: int) -> Any:
    """A batch and its samples' weights, float64 (m,): a float32 cannot hold 6/5.

    A plain tuple or list becomes ``(x, y, w)``; all else (a tensor, dict, named tuple, object) ``(batch, w)``.
    """
    weights = torch.full((samples,), weight, dtype=torch.float64)
    return (*contents, weights) if type(contents) in (list, tuple) else (contents, weights)


class _Counted:
    """A ``collate_fn`` that also says of how many samples the batch is, and fingerprints of ``marked`` more."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate, self.marked = collate, _MARKED

    def __call__(self, samples: list[Any]) -> tuple[int, Any, Any]:
        worker = torch.utils.data.get_worker_info()
        marks = [(worker.id if worker else 0, fingerprint(one)) for one in samples[: self.marked]]
        self.marked -= len(marks)
        return len(samples), np.array(marks, dtype=np.int64).reshape(-1, 2), self._collate(samples)


class _Sizes:
    """What each rank says of its next batch, asked under a name that no other stream in use has."""

    _used: ClassVar[set[str]] = set()
    _unread: ClassVar[dict[str, PendingCollective]] = {}
    """By name: the answers to what was asked in a loop that was left."""

    def __enter__(self) -> _Sizes:
        names = (f"hvdkit.stream.{number}" for number in itertools.count())
        self._name = next(name for name in names if name not in self._used)
        self._used.add(self._name)
        with contextlib.suppress(KeyError, HorovodInternalError):  # of a Horovod that was started anew since
            self.answers()
        return self

    def __exit__(self, *_: object) -> None:
        self._used.discard(self._name)

    def ask(self, size: int) -> None:
        self._unread[self._name] = RANKS.start(ALLGATHER, np.array([size], dtype=np.int64), self._name)

    def answers(self) -> list[int]:
        sizes: list[int] = self._unread.pop(self._name).wait().tolist()
        return sizes


def _warn_of_copies(marks: Any) -> None:
    """Where several ranks or DataLoader workers read the same samples, since each reads the stream as a whole.

    A collective; ``marks``: the worker that read each of this rank's samples, and its fingerprint, int64 (m, 2).
    """
    mine = np.insert(marks, 0, hvd.rank(), axis=1)[marks[:, 1] > 0][: 8 * _MARKED]
    read = np.concatenate(RANKS.allgather(mine, "hvdkit.stream.copies"))
    by_reader, readers = np.unique(read, axis=0), len(np.unique(read[:, :2], axis=0))
    several, again = len(by_reader) - len(np.unique(by_reader[:, 2])), len(read) - len(by_reader)
    # Data that repeat themselves do so within each reader, too; what is drawn with replacement repeats a little.
    if hvd.rank() == 0 and 5 * several >= len(read) > 0 and several > 4 * readers * again:
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
        self._compared, self._marks = False, [_NO_MARKS]
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, self._loader.num_workers

    def __iter__(self) -> Iterator[Any]:
        with _Sizes() as asked:
            yield from self._steps(asked)

    def _steps(self, asked: _Sizes) -> Iterator[Any]:
        """The batches of a pass, as the ranks agree on each."""
        batches = itertools.chain(self._loader, itertools.repeat((0, _NO_MARKS, None)))
        self._marks = [_NO_MARKS]  # in another pass a sample may be another rank's
        size, contents = self._next(batches, asked)
        filler: tuple[int, Any] = 0, None
        for step in itertools.count():
            sizes = asked.answers()
            self._require(sizes, contents, first=step == 0)
            weights = stream_weights(sizes, self.batch_size, self._remainder)
            if not self._compared and (weights is None or step == _COMPARED_AT):
                self._compared, self._collate.marked = True, 0
                _warn_of_copies(np.concatenate(self._marks))
            if weights is None:
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
            if not self._compared:
                self._marks.append(marks)
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


def this_ranks_part(dataset: Any, world: Topology) -> Any:
    """The stream, dealt out to the ranks where it is HuggingFace's; another one yields its own part itself."""
    if isinstance(dataset, IterDataPipe):
        _require_no_sharding_filter(dataset)
    huggingface = sys.modules.get("datasets")
    if world.size == 1 or huggingface is None or not isinstance(dataset, huggingface.IterableDataset):
        return dataset
    require_same_data(
        RANKS,
        world,
        list(_sources(dataset._ex_iterable)),
        "sort its files, and give shuffle a seed: dataset.shuffle(seed=0), or what makes it on every rank",
    )
    split = dataset._distributed

    def require_this_split() -> None:
        if split is not None and (split.rank, split.world_size) != (world.rank, world.size):
            raise InvalidArgumentError(
                f"the data set was split for rank {split.rank} of {split.world_size}, and this is rank {world.rank} of "
                f"{world.size}; leave split_dataset_by_node out, shard calls it."
            )

    if RANKS.size() == world.size:
        RANKS.together(require_this_split)
    if split is not None:
        return dataset
    return importlib.import_module("datasets.distributed").split_dataset_by_node(dataset, world.rank, world.size)


def _sources(examples: Any) -> Iterator[str]:
    """What decides the order of HuggingFace's samples: the states of its shuffles, and lists of files."""
    generator = getattr(examples, "generator", None)
    if generator is not None:
        state = zlib.crc32(repr(generator.bit_generator.state).encode())
        yield f"the random state {state:08x} of {type(examples).__name__}"
    for value in getattr(examples, "kwargs", {}).values():
        if isinstance(value, list):
            yield from (os.fspath(one) for one in value if isinstance(one, (str, os.PathLike)))
    for inner in getattr(examples, "ex_iterables", [getattr(examples, "ex_iterable", None)]):
        if inner is not None:
            yield from _sources(inner)


def _require_no_sharding_filter(pipe: Any) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    graph = [traverse_dps(pipe)]
    while graph:
        for part, inner in graph.pop().values():
            graph.append(inner)
            if hasattr(part, "apply_sharding"):
                raise InvalidArgumentError(
                    "sharding_filter deals out samples by torch.distributed, which this job does not have: every rank "
                    f"would read all of them. Leave it out. {EVERY_NTH}"
                )


@contextlib.contextmanager
def known_rank(world: Topology) -> Iterator[None]:
    """RANK and WORLD_SIZE say who reads, for webdataset and others that ask them, and for workers that begin here."""
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
