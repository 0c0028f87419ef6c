"""hvdkit.torch.shard over streams, batches of every form and samplers, on real ranks."""

import collections
import importlib
import itertools
import operator
import os
import random
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

import hvdkit

Pair = collections.namedtuple("Pair", "x y")
FORMS = ("tensor", "number", "pair", "dict", "named", "nested", "object", "strings", "samples")


def sample(form: str, number: int) -> Any:
    """Sample ``number`` of a data set whose batches have this form."""
    import torch

    x, y = torch.full((3,), float(number)), torch.tensor(number)
    return {
        "tensor": x,
        "number": number,
        "pair": (x, y),
        "dict": {"name": str(number), "x": x, "y": y},
        "named": Pair(x, y),
        "nested": {"views": [x, (x, {"deep": y})]},
        "object": (x, y),
        "strings": (str(number), x),
        "samples": (x, y),
    }[form]


def collate(form: str) -> Any:
    return {"object": boxed, "samples": list}.get(form)


def boxed(samples: Any) -> Any:
    """An object like a dict, as tokenizers make them; its first tensor has not one row for each sample."""
    import torch

    x, y = zip(*samples, strict=True)
    return collections.UserDict(packed=torch.cat(x), y=torch.stack(y))


def opened(form: str, batch: Any) -> tuple[list[int], Any]:
    """The numbers of a batch's samples, and their weights; where it can be, the batch is then changed."""
    if form in ("pair", "strings", "samples"):
        *batch, w = batch
    else:
        batch, w = batch
    if form == "samples":
        return [int(y) for _, y in batch], w
    if form in ("tensor", "number"):
        return (batch if form == "number" else batch[:, 0]).int().tolist(), w
    if form in ("pair", "strings"):
        return [int(one) for one in batch[form == "pair"]], w
    if form == "named":
        return batch.y.tolist(), w
    if form == "nested":
        return batch["views"].pop()[1].pop("deep").tolist(), w
    assert "x" in batch or batch.pop("packed").shape == (3 * len(w),)
    return batch.pop("y").tolist(), w


def stream(numbers: Any, form: str = "pair", fails_at: int | None = None) -> Any:
    """A stream of the samples with these numbers; each DataLoader worker yields its own part of them."""
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            worker = torch.utils.data.get_worker_info()
            part = slice(worker.id, None, worker.num_workers) if worker else slice(None)
            for number in numbers[part]:
                if number == fails_at:
                    raise OSError(f"sample {number} cannot be read")
                yield sample(form, number)

    return Stream()


def map_style(form: str, length: int) -> Any:
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return length

        def __getitem__(self, number: int) -> Any:
            return sample(form, number)

    return Data()


def own_numbers(world: Any) -> range:
    """Rank r has 3 + 4 * r samples."""
    return range(100 * world.rank, 100 * world.rank + 3 + 4 * world.rank)


def require_each_once(taken: list[list[tuple[list[int], list[float]]]], expected: list[int]) -> None:
    """``taken``: by rank and step, numbers and weights. Each sample once, and the weights those of the global batch."""
    assert len({len(steps) for steps in taken}) == 1
    seen = []
    for step in zip(*taken, strict=True):
        real = [numbers for numbers, w in step if w[0] > 0]
        total = sum(map(len, real))
        for numbers, w in step:
            assert len(numbers) == len(w) > 0
            assert w == pytest.approx([len(numbers) * len(taken) / total if w[0] else 0.0] * len(w))
        seen += itertools.chain(*real)
    assert sorted(seen) == sorted(expected)


@on_ranks("torch", n=3)
@pytest.mark.parametrize("form", FORMS)
def test_a_stream_of_any_form_gives_each_sample_once(hk, world, everyone, form):
    loader = hk.shard(stream(own_numbers(world), form), world, 2, remainder="exact", collate_fn=collate(form))
    for _ in range(2):
        taken = [opened(form, batch) for batch in loader]
        found = everyone([(numbers, w.tolist()) for numbers, w in taken])
        require_each_once(found, list(itertools.chain(*everyone(list(own_numbers(world))))))
        assert found[0][-1][1][0] == 0.0  # the rank with the fewest samples has had fillers


@on_ranks("torch", n=2)
@pytest.mark.parametrize("form", ["pair", "object", "samples"])
def test_a_map_style_set_of_any_form_gives_each_sample_once(hk, world, everyone, form):
    loader = hk.shard(map_style(form, 4 * world.size + 1), world, 2, remainder="exact", collate_fn=collate(form))
    taken = [opened(form, batch) for batch in loader]
    require_each_once(everyone([(numbers, w.tolist()) for numbers, w in taken]), list(range(4 * world.size + 1)))


@on_ranks("torch", n=2)
def test_batches_keep_their_form_without_weights(hk, world):
    for data in (stream(range(5), "named"), map_style("named", 12)):
        assert {type(batch) for batch in hk.shard(data, world, 2)} == {Pair}


@on_ranks("torch", n=2)
def test_workers_with_ragged_ends_lose_no_sample_of_a_stream(hk, world, everyone):
    """Three workers of rank r have 4 + 4 * r, 4 + 4 * r and 3 + 4 * r samples."""
    mine = range(100 * world.rank, 100 * world.rank + 11 + 12 * world.rank)
    loader = hk.shard(stream(mine, "dict"), world, 3, remainder="exact", num_workers=3)
    taken = [opened("dict", batch) for batch in loader]
    found = everyone([(numbers, w.tolist()) for numbers, w in taken])
    require_each_once(found, list(itertools.chain(*everyone(list(mine)))))


@on_ranks("torch", n=2)
def test_drop_leaves_out_the_last_short_batch_of_each_worker(hk, world, everyone):
    """Of 11 + r and 4 samples. Worker 1 has had its short batch when worker 0 still has a full one."""
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            worker = torch.utils.data.get_worker_info().id
            return iter(range(20 * worker, 20 * worker + (4 if worker else 11 + world.rank)))

    found = everyone([batch.tolist() for batch in hk.shard(Stream(), world, 3, num_workers=2)])
    assert found == [[[0, 1, 2], [20, 21, 22], [3, 4, 5], [6, 7, 8]]] * world.size


@on_ranks("torch", n=3)
def test_a_stream_of_dicts_trains_as_one_process_on_the_union_batch(hk, world, everyone):
    import torch

    def net() -> Any:
        torch.manual_seed(0)
        return torch.nn.Linear(3, 2).double()

    def target(y: Any) -> Any:
        return torch.stack([y, y * y], dim=1).double() / 100

    model, alone = net(), net()
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9), model)
    single = torch.optim.SGD(alone.parameters(), lr=1e-5, momentum=0.9)
    loss_of = hk.weighted_loss(torch.nn.MSELoss())
    mine = [number + 1 for number in own_numbers(world)]
    for batch, w in hk.shard(stream(mine, "dict"), world, 2, remainder="exact", num_workers=2):
        optimizer.zero_grad()
        loss_of(model(batch["x"].double()), target(batch["y"]), w).backward()
        optimizer.step()
        y = torch.tensor(list(itertools.chain(*everyone(batch["y"][w > 0].tolist()))))
        single.zero_grad()
        torch.nn.functional.mse_loss(alone(y[:, None].repeat(1, 3).double()), target(y)).backward()
        single.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@on_ranks("torch", n=3)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_fails_on_a_rank_is_one_error_on_every_rank(hk, world, workers):
    numbers = range(8 + 8 * world.rank)  # the others may have ended by then
    loader = hk.shard(
        stream(numbers, fails_at=10 if world.rank == 1 else None), world, 2, remainder="exact", num_workers=workers
    )
    expected = OSError if world.rank == 1 else hvdkit.DataError
    with pytest.raises(expected, match="10 cannot be read" if world.rank == 1 else "data set of rank 1 raised"):
        for _ in loader:
            pass
    # In a ring it would wait for the garbage collector, and PyTorch then 5 s for each worker.
    held = weakref.ref(loader)
    del loader
    assert held() is None


@on_ranks("torch", n=3)
def test_a_rank_that_fills_no_batch_is_one_error_on_every_rank(hk, world):
    few = stream(range(1 if world.rank == 1 else 9))
    with pytest.raises(hvdkit.InvalidArgumentError, match=r"rank 1 does not fill one batch of 2.*remainder='exact'"):
        list(hk.shard(few, world, 2))
    with pytest.raises(hvdkit.InvalidArgumentError, match="rank 1 is empty"):
        list(hk.shard(stream(range(9 * (world.rank != 1))), world, 2, remainder="exact"))


@on_ranks("torch", n=2)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_all_read_as_a_whole_is_a_warning(hk, world, workers):
    import torch

    class Whole(torch.utils.data.IterableDataset):
        def __init__(self, first: int) -> None:
            self._first = first

        def __iter__(self) -> Any:
            return (sample("dict", self._first + number) for number in range(8))

    own = stream(range(20 * world.rank, 20 * world.rank + 8), "dict")
    constant = stream([7] * 8, "dict")
    ours = Whole(20 * world.rank)  # each worker yields all of it
    for data, copies in ((own, False), (constant, False), (Whole(0), True), (ours, workers > 1)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            list(hk.shard(data, world, 2, num_workers=workers))
        found = any("read by another rank or DataLoader worker" in str(one.message) for one in seen)
        assert found == (copies and world.is_root)


@on_ranks("torch", n=2)
def test_a_stream_may_begin_with_samples_that_hold_nothing(hk, world, everyone):
    """An image without boxes, which detectors are given as (0, 4); a view that is to be conjugated or negated."""
    import torch

    spectrum = torch.tensor([1 + 2j, 3 - 1j]).conj()

    class Images(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            for number in range(world.rank, 5, world.size):
                yield {"boxes": torch.ones(number // 2, 4), "views": (spectrum, spectrum.imag), "y": number}

    loader = hk.shard(Images(), world, 1, remainder="exact", collate_fn=operator.itemgetter(0))
    taken = everyone([([batch["y"]], w.tolist()) for batch, w in loader])
    require_each_once(taken, list(range(5)))


@on_ranks("torch", n=2)
def test_streams_can_be_left_early_and_read_side_by_side(hk, world, everyone):
    numbers = own_numbers(world)
    one, other = (hk.shard(stream(mine), world, 2, remainder="exact") for mine in (numbers, range(40)))
    for _ in range(3):
        for x, _, _ in itertools.islice(one, 2):
            assert x[0, 0] in numbers
        taken = [opened("pair", mine) for mine, _ in zip(one, other, strict=False)]
        found = everyone([(samples, w.tolist()) for samples, w in taken])
        require_each_once(found, list(itertools.chain(*everyone(list(numbers)))))


@on_ranks("torch", n=3)
def test_a_sampler_draws_for_all_ranks_together(hk, world, everyone):
    import torch

    torch.manual_seed(world.rank)
    chances, data = torch.arange(30.0) % 3, map_style("number", 30)

    def loader(world: Any, batch_size: int, **options: Any) -> Any:
        sampler = torch.utils.data.WeightedRandomSampler(chances, 20, **options)
        return hk.shard(data, world, batch_size, remainder="exact", seed=4, sampler=sampler)

    for options in ({}, {"generator": torch.Generator().manual_seed(world.rank)}):
        whole = loader(hvdkit.Topology(0, 1), 4 * world.size, **options)
        mine = loader(world, 4, **options)
        assert len(mine) == hk.steps_per_epoch(20, 4, world, "exact")
        epochs = []
        for _ in range(2):
            together = everyone([batch[w > 0].tolist() for batch, w in mine])
            steps = [sorted(itertools.chain(*step)) for step in zip(*together, strict=True)]
            assert steps == [sorted(batch.tolist()) for batch, _ in whole]
            epochs.append(steps)
        assert epochs[0] != epochs[1]
        drawn = list(itertools.chain(*epochs[0], *epochs[1]))
        assert len(drawn) == 40 and not [number for number in drawn if number % 3 == 0]
    before = [torch.get_rng_state(), options["generator"].get_state()]
    mine.share.order(7)
    after = [torch.get_rng_state(), options["generator"].get_state()]
    assert all(map(torch.equal, before, after))  # the draw is nobody else's


@on_ranks("torch", n=2)
@pytest.mark.parametrize("source", ["numpy", "python"])
def test_a_sampler_draws_from_any_global_generator_alike(hk, world, everyone, source):
    class Shuffled(list):
        def __iter__(self) -> Any:
            return iter(np.random.permutation(12) if source == "numpy" else random.sample(range(12), 12))

    random.seed(world.rank)
    np.random.seed(world.rank)
    loader = hk.shard(map_style("number", 12), world, 2, sampler=Shuffled(range(12)))
    assert sorted(itertools.chain(*itertools.chain(*everyone([batch.tolist() for batch in loader])))) == list(range(12))
    states = random.getstate(), np.random.get_state()[1].tolist()
    loader.share.order(7)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


@on_ranks("torch", n=2)
def test_a_sampled_epoch_goes_on_where_it_was(hk, world):
    import torch

    def loader() -> Any:
        sampler = torch.utils.data.RandomSampler(range(24), replacement=True, num_samples=24)
        return hk.shard(map_style("number", 24), world, 3, sampler=sampler)

    whole = [batch.tolist() for batch in loader()]
    first, second = loader(), loader()
    for batch in itertools.islice(first, 2):
        assert batch.tolist() == whole.pop(0)
    second.load_state(first.state())
    assert [batch.tolist() for batch in second] == whole


@on_ranks("torch", n=3)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_data_set_may_grow_and_shrink_between_epochs(hk, world, everyone, sampled):
    """Active learning, a buffer of what was seen: PyTorch's own loader asks for the length in each epoch."""
    import torch

    numbers = list(range(7))
    options = {"sampler": torch.utils.data.RandomSampler(numbers)} if sampled else {}
    loader = hk.shard(numbers, world, 2, remainder="exact", **options)
    for length in (7, 13, 3):
        numbers[:] = range(length)
        assert len(loader) == hk.steps_per_epoch(length, 2, world, "exact")
        require_each_once(everyone([(batch.tolist(), w.tolist()) for batch, w in loader]), numbers)
    numbers[:] = range(20)
    next(iter(loader))
    loader.load_state(loader.state())
    numbers.append(20)
    with pytest.raises(hvdkit.InvalidArgumentError, match="has 21 samples now and had 20 when this epoch began"):
        iter(loader)


@on_ranks("torch", n=2)
def test_a_sampler_that_draws_differently_on_each_rank_is_found(hk, world):
    import torch

    class Own(torch.utils.data.Sampler):
        def __init__(self, seed: int) -> None:
            self._generator = np.random.default_rng(seed)

        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Any:
            return iter(self._generator.permutation(8))

    alike, apart = (hk.shard(map_style("number", 8), world, 2, sampler=Own(seed)) for seed in (0, world.rank))
    hk.check_agreement(torch.nn.ReLU(), None, world, loader=alike)
    with pytest.raises(hvdkit.AgreementError, match=r"loader\.order differs between rank 0 and rank 1"):
        hk.check_agreement(torch.nn.ReLU(), None, world, loader=apart)


@on_ranks("torch", n=2)
def test_a_loader_says_what_programs_ask_of_it(hk, world):
    """How many samples a batch and an epoch have, as a plain DataLoader says it."""
    import torch

    loader = hk.shard(torch.utils.data.TensorDataset(torch.arange(40.0)), world, 4)
    assert (loader.batch_size, len(loader), len(loader.dataset)) == (4, 5, 40)
    assert [len(x) for (x,) in loader] == [loader.batch_size] * len(loader)
    numbers = stream(range(9))
    loader = hk.shard(numbers, world, 4)
    assert (loader.batch_size, loader.dataset, loader.num_workers) == (4, numbers, 0)


@on_ranks("torch", n=1)
def test_what_shard_cannot_take_says_what_to_do_instead(hk, world):
    import torch
    from torch.utils import data
    from torch.utils.data.datapipes.iter import IterableWrapper

    class Endless(data.Dataset):
        def __getitem__(self, number: int) -> Any:
            return number

    class Short(data.SequentialSampler):
        def __len__(self) -> int:
            return 5

    ten = data.TensorDataset(torch.arange(10))
    for dataset, options, part in (
        (ten, {"batch_sampler": [[0, 1]]}, "takes no batch_sampler: shard makes the batches; give .* sampler="),
        (ten, {"drop_last": True}, "takes no drop_last: .* remainder="),
        (ten, {"sampler": data.DistributedSampler(ten, 2, 0)}, "DistributedSampler gives each rank a part"),
        (ten, {"sampler": iter(range(10))}, "sampler with a length, got range_iterator"),
        (stream(range(9)), {"sampler": range(9)}, "leave sampler out"),
        (Endless(), {}, r"a data set with a length, got Endless; .*Subset\(dataset, range\(n\)\)"),
        (iter([1]), {}, r"list_iterator can only be iterated\. .*islice\(source, world.rank, None, world.size\)"),
        ((np.zeros((9, 2)), np.zeros(9)), {}, r"2 arrays, which PyTorch takes for 2 samples; .*TensorDataset"),
        (IterableWrapper(range(9)).sharding_filter(), {}, "sharding_filter deals out .* by torch.distributed"),
        (data.DataLoader(ten, 2), {}, r"got a DataLoader; .*shard\(loader.dataset, world, batch_size"),
        (hk.shard(ten, world, 2), {}, "got a ShardedLoader"),
    ):
        with pytest.raises(hvdkit.InvalidArgumentError, match=part):
            hk.shard(dataset, world, 2, **options)
    for sampler, part in (([[0, 1], [2, 3]], r"must yield indices, got \[0, 1\] from list"), (Short(ten), "drew 10")):
        with pytest.raises(hvdkit.InvalidArgumentError, match=part):
            list(hk.shard(ten, world, 2, sampler=sampler))


@on_ranks("torch", n=2)
def test_parts_and_joins_of_data_sets_give_each_sample_once(hk, world, everyone):
    import torch
    from torch.utils import data

    class AtOnce(data.Dataset):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, number: int) -> Any:
            raise AssertionError("one by one")

        def __getitems__(self, numbers: list[int]) -> list[int]:
            return [10 * number for number in numbers]

    class WithoutLength(data.Dataset):
        def __getitem__(self, number: int) -> Any:
            return torch.tensor(10 * number)

    tens = data.Subset(WithoutLength(), range(7))
    joined = data.ConcatDataset([data.Subset(tens, [0, 2]), data.Subset(tens, [1, 3, 4, 5, 6])])
    for dataset in (AtOnce(), data.Subset(AtOnce(), range(7)), tens, joined):
        mine = [batch[w > 0].tolist() for batch, w in hk.shard(dataset, world, 2, remainder="exact")]
        assert sorted(itertools.chain(*itertools.chain(*everyone(mine)))) == [10 * number for number in range(7)]


@on_ranks("torch", n=2)
@pytest.mark.parametrize("workers", [0, 2])
def test_webdataset_gives_each_sample_once(hk, world, everyone, workers, tmp_path):
    import torch

    wds = pytest.importorskip("webdataset")
    urls = [str(tmp_path / f"{number}.tar") for number in range(6)]
    if world.is_root:
        for number, url in enumerate(urls):
            with wds.TarWriter(url) as tar:
                for sample in range(10 * number, 10 * number + 10):
                    tar.write({"__key__": f"{sample:03d}", "txt": str(sample)})
    everyone(None)

    def numbers(splitter: Any) -> Any:
        data = wds.WebDataset(urls, shardshuffle=6, nodesplitter=splitter).shuffle(20).decode().to_tuple("txt")
        return data.map(lambda sample: torch.tensor(int(sample[0])))

    loader = hk.shard(numbers(wds.split_by_node), world, 4, remainder="exact", num_workers=workers)
    for _ in range(2):
        require_each_once(everyone([(x.tolist(), w.tolist()) for x, w in loader]), list(range(60)))
    assert "RANK" not in os.environ
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        list(hk.shard(numbers(iter), world, 4, num_workers=workers))
    assert any("nodesplitter=wds.split_by_node" in str(one.message) for one in seen) == world.is_root


@on_ranks("torch", n=3)
def test_huggingface_streams_give_each_sample_once(hk, world, everyone):
    datasets = pytest.importorskip("datasets")
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    whole = datasets.Dataset.from_dict({"x": list(range(60))})
    for shards in (1, 6):
        stream = whole.to_iterable_dataset(num_shards=shards)
        for own in (stream, stream.shuffle(seed=1, buffer_size=20), split(stream, world.rank, world.size)):
            loader = hk.shard(own.with_format("torch"), world, 4, remainder="exact")
            require_each_once(everyone([(x["x"].tolist(), w.tolist()) for x, w in loader]), list(range(60)))
        with pytest.raises(hvdkit.AgreementError, match=r"the random state .* dataset\.shuffle\(seed=0\)"):
            hk.shard(stream.shuffle(seed=world.rank), world, 4)
        with pytest.raises(hvdkit.HvdkitError, match=rf"was split for rank 0 of {world.size}, and this is rank"):
            hk.shard(split(stream, 0, world.size), world, 4)
    with pytest.raises(hvdkit.AgreementError, match=r"Dataset\[\d+\] is {'x': \d+} on rank 0 and"):
        hk.shard(whole.train_test_split(test_size=0.2, seed=world.rank)["train"], world, 4)
