"""Streams of other libraries, which deal out their samples by a job's ranks themselves where they know these."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.same_data import require_same_data
from hvdkit.steps.topology import Topology
from hvdkit.torch.state import RANKS

EVERY_NTH = (
    "Give shard a torch.utils.data.IterableDataset whose __iter__ is "
    "`return itertools.islice(source, world.rank, None, world.size)`, of a source in the same order on every rank."
)


def this_ranks_part(dataset: Any, world: Topology) -> Any:
    """The stream, dealt out to the ranks where it is HuggingFace's; another one yields its own part itself.

    Raises:
        InvalidArgumentError: one that would be read as a whole by every rank.
        AgreementError: HuggingFace's is shuffled without a seed, or has its files in another order on some rank.
    """
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
    if RANKS.size() == world.size:
        RANKS.together(lambda: _require_not_split_otherwise(dataset._distributed, world))
    if dataset._distributed is not None:
        return dataset
    return importlib.import_module("datasets.distributed").split_dataset_by_node(dataset, world.rank, world.size)


def _require_not_split_otherwise(split: Any, world: Topology) -> None:
    if split is not None and (split.rank, split.world_size) != (world.rank, world.size):
        raise InvalidArgumentError(
            f"the data set was split for rank {split.rank} of {split.world_size}, and this is rank {world.rank} of "
            f"{world.size}; leave split_dataset_by_node out, shard calls it."
        )


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
    """RANK and WORLD_SIZE say who reads, for webdataset and others that ask them, and for the workers that begin here.

    ``hvdkit launch`` sets them for a whole job; plain ``mpirun`` and ``srun`` do not.
    """
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
