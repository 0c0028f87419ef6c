"""Data sets that hold other samples behind the same indices are one error on every rank; all others are none."""

import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

import hvdkit

FILES = [f"part/img_{number:03d}.png" for number in range(80)]


@dataclasses.dataclass
class Record:
    path: Path
    label: int


class Images:
    """A data set of files: anything that has a length and takes an index."""

    def __init__(self, files: Any, **others: Any) -> None:
        self.files = files
        vars(self).update(others)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("shard reads no sample")


class Augmented(Images):
    """What differs between ranks and is no sample: caches, handles, generators, notes, places."""

    def __init__(self, rank: int) -> None:
        super().__init__([f"/scratch/rank{rank}/{name}" for name in FILES], root=Path(f"/scratch/rank{rank}"))
        self.handle, self.opened = Path(__file__).open(), time.time()  # noqa: SIM115
        self.random, self.generator = random.Random(rank), np.random.default_rng(rank)  # noqa: S311
        self.cache = {number: np.full(3, rank) for number in range(rank + 1)}
        self.by_name = {name: np.full(3, rank) for name in FILES[: rank + 1]}
        self.loaded = [np.full(3, rank) if number == rank else None for number in range(80)]
        self.devices, self.times = [rank], [time.time()] * 3
        self.objects = [object() for _ in FILES]
        self.transform = lambda x: x + self.random.random()
        if rank:
            self.log = ["rank 1 was here"]
        self.mean = np.array([0.1 + rank])


def shuffled(seed: int, values: Any = FILES) -> Any:
    values = list(values)
    random.Random(seed).shuffle(values)  # noqa: S311
    return values


def made(what: str, seed: int) -> Any:
    """A data set of 80 samples that is another one for each seed."""
    import pandas
    import torch
    from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

    generator = np.random.default_rng(seed)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(seed))
    x = torch.arange(240.0).reshape(80, 3)

    class Around(Images):
        def __getitem__(self, index: int) -> Any:
            return around[index]

    around = shuffled(seed)
    plain = Images(FILES)
    kinds = {
        "files": lambda: Images(shuffled(seed)),
        "paths": lambda: Images([Path(one) for one in shuffled(seed)]),
        "in a tuple": lambda: Images([(one, 0) for one in shuffled(seed)]),
        "records": lambda: Images([Record(Path(one), 0) for one in shuffled(seed)]),
        "dicts": lambda: Images([{"label": 1, "path": one} for one in shuffled(seed)]),
        "by number": lambda: Images(plain.files, table=dict(enumerate(shuffled(seed)))),
        "columns": lambda: Images(plain.files, data={"text": shuffled(seed), "label": [0] * 80}),
        "few files": lambda: Images(range(80), chunks=[f"{one}.npz" for one in shuffled(seed, range(8))]),
        "random_split": lambda: random_split(plain, [60, 20], generator=torch.Generator().manual_seed(seed))[0],
        "Subset": lambda: Subset(Subset(plain, range(80)), order),
        "ConcatDataset": lambda: ConcatDataset([plain, Images(shuffled(seed))]),
        "a wrapper": lambda: Images(range(80), base=Images(range(80), base=Images(shuffled(seed)))),
        "a variable around": lambda: Around(range(80)),
        "a list": lambda: shuffled(seed),
        "samples": lambda: [(x[number], number) for number in order.tolist()],
        "tensors": lambda: TensorDataset(x[order], torch.zeros(80)),
        "labels": lambda: TensorDataset(x, torch.arange(80)[order]),
        "half": lambda: TensorDataset(x[order].bfloat16()),
        "arrays": lambda: Images(range(80), x=generator.permutation(x.numpy())),
        "pandas": lambda: Images(range(80), table=pandas.DataFrame({"x": order.numpy(), "t": pandas.Timestamp(0)})),
        "other lengths": lambda: Images(FILES[: 79 + seed]),
        "other shapes": lambda: Images(FILES, x=np.zeros((80, 2 + seed))),
    }
    return kinds[what]()


TORCH = (
    *(
        "files",
        "paths",
        "in a tuple",
        "records",
        "dicts",
        "by number",
        "columns",
        "few files",
        "random_split",
        "Subset",
    ),
    *("ConcatDataset", "a wrapper", "a variable around", "a list", "samples", "tensors", "labels", "half", "arrays"),
    *("pandas", "other lengths", "other shapes"),
)


def error_of(action: Any) -> str:
    try:
        action()
    except hvdkit.AgreementError as error:
        return str(error)
    return ""


@on_ranks("torch", n=3)
def test_data_sets_that_differ_are_one_error_on_every_rank(hk, world, everyone):
    for what in TORCH:
        hk.shard(made(what, 0), world, 4)
        errors = everyone(error_of(lambda what=what: hk.shard(made(what, int(world.rank == 1)), world, 4)))
        assert set(errors) == {errors[0]}
        assert "the ranks' data sets differ: " in errors[0], what
    hk.shard(Augmented(world.rank), world, 4)
    torch = pytest.importorskip("torch")
    rounded = torch.arange(1.0, 241.0).reshape(80, 3) * (1 + 1e-6 * world.rank)
    hk.shard(torch.utils.data.TensorDataset(rounded), world, 4)
    sampler = torch.utils.data.SubsetRandomSampler(shuffled(world.rank, range(80)))
    errors = everyone(error_of(lambda: hk.shard(range(80), world, 4, sampler=sampler)))
    assert all("SubsetRandomSampler.indices[0] is" in error for error in errors), errors


@on_ranks("torch", n=2)
def test_the_first_entry_that_differs_is_named(hk, world, everyone):
    names = [f"{number}.png" for number in range(5000)]
    names[3210] = "b.png" if world.rank else "a.png"
    error, other = everyone(error_of(lambda: hk.shard(Images(names), world, 4)))
    assert "Images.files[3210] is 'a.png' on rank 0 and 'b.png' on rank 1" in error == other


@on_ranks("tensorflow", "keras", "arrays", mpi=[("arrays", 2)])
def test_arrays_that_differ_are_one_error_on_every_rank(hk, world, everyone):
    x, y = np.arange(240.0).reshape(80, 3), np.arange(80)
    order = np.random.default_rng(world.rank).permutation(80)
    for alike, apart in (((x, y), (x[order], y)), ((x, y), (x, y[order])), (x, x[order]), (x, x[: 79 + world.rank])):
        hk.shard(alike, world, 4)
        error, other = everyone(error_of(lambda apart=apart: hk.shard(apart, world, 4)))
        assert "the ranks' data sets differ: data[" in error == other
