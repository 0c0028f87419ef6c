"""hvdkit.torch proves that the ranks agree: desynchronised ranks, seeds, statistics, uneven work, on real ranks."""

import random
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from programs_checks import message, signs
from ranks import on_ranks

import hvdkit
from hvdkit.observe import allreduce_counts
from hvdkit.steps import agreement

FEATURES, CLASSES = 4, 3


def make_model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def flat(tensors: Any) -> list[float]:
    import torch

    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).tolist()


class Training:
    """One training on all ranks, step by step."""

    def __init__(self, hk: Any, world: hvdkit.Topology, optimizer: str = "Adam") -> None:
        import torch

        x = torch.randn(24, FEATURES, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(0)
        self.model = make_model()
        made = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01)
        self.optimizer = hk.distribute(made, self.model)
        hk.broadcast_state(self.model, self.optimizer)
        self.loader = hk.shard(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), world, 4)

    def step(self) -> None:
        import torch

        x, y = next(iter(self.loader))
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()


SMALL = {
    "slot": "optimizer.state.0.exp_avg {between} 0.0001",
    "buffer": "scale {between} 2",
    "sign of zero": "scale {between} 0;",
    "seeded anew": "torch seeded anew {between} 1",
}


def inject(hk: Any, world: hvdkit.Topology, training: Training, kind: str) -> None:
    import torch

    slots = training.optimizer.state[training.model[0].weight]
    with torch.no_grad():
        if kind == "slot":
            slots["exp_avg"][0, 0] += 1e-4
        elif kind == "buffer":
            training.model.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16) * 2)
        elif kind == "sign of zero":
            training.model.register_buffer("scale", -torch.zeros(2, dtype=torch.bfloat16))
        elif kind == "seeded anew":
            torch.manual_seed(0)


@pytest.mark.parametrize("kind", SMALL)
@on_ranks("torch", n=2)
def test_whatever_the_last_rank_alone_changes_is_named(hk, world, kind):
    import torch

    training = Training(hk, world)
    hk.seed_everything(3, world)
    training.step()
    training.model.register_buffer("scale", torch.zeros(2, dtype=torch.bfloat16))
    if world.rank == world.size - 1:
        inject(hk, world, training, kind)
    found = message(lambda: hk.check_agreement(training.model, training.optimizer, world, loader=training.loader))
    assert SMALL[kind].format(between="differs between rank 0 and rank 1, by at most") in found


@on_ranks("torch", n=2)
def test_flipped_top_bits_are_named_and_so_is_a_seed_that_all_ranks_replaced(hk, world):
    import torch

    hk.seed_everything(3, world)
    torch.manual_seed(5)
    replaced = message(lambda: hk.check_agreement(make_model(), None, world))
    assert "seeded with 5 after seed_everything" in replaced
    hk.seed_everything(3, world)
    for values in signs(world.rank).values():
        flipped = torch.nn.Module()
        flipped.register_buffer("signs", torch.from_numpy(values))
        found = message(lambda flipped=flipped: hk.check_agreement(flipped, None, world))
        assert "signs differs between rank 0 and rank 1, by at most 2;" in found


@on_ranks("torch", n=2)
def test_batch_norm_statistics(hk, world, everyone):
    """Each rank's own, then averaged, then those of the global batch."""
    import torch
    from torch import nn

    training = Training(hk, world)
    training.step()
    local = everyone(training.model[1].running_mean.tolist())
    assert local[0] != local[1]
    hk.check_agreement(training.model, training.optimizer, world)
    found = message(lambda: hk.check_agreement(training.model, training.optimizer, world, statistics=True))
    assert "1.running_mean differs between rank 0 and rank 1" in found
    hk.average_statistics(training.model)
    mean = [(first + second) / 2 for first, second in zip(*local, strict=True)]
    assert training.model[1].running_mean.tolist() == pytest.approx(mean)
    hk.check_agreement(training.model, None, world, statistics=True)

    synchronised = hk.sync_batch_norm(nn.Sequential(nn.BatchNorm2d(2, momentum=None), nn.Flatten()))
    whole = nn.Sequential(nn.BatchNorm2d(2, momentum=None), nn.Flatten())
    images = torch.randn(2 * world.size, 2, 3, 3, generator=torch.Generator().manual_seed(4), requires_grad=True)
    for _ in range(2):
        mine = synchronised(images[world.rank :: world.size])
        expected = whole(images)[world.rank :: world.size]
    assert (mine - expected).abs().max() < 1e-5
    running, theirs = (flat([net[0].running_mean, net[0].running_var]) for net in (synchronised, whole))
    assert running == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert not any(one.requires_grad for one in synchronised.buffers())
    assert (synchronised.eval()(images) - whole.eval()(images)).abs().max() < 1e-5
    hk.check_agreement(synchronised, None, world)
    assert "Linear has no BatchNorm" in message(lambda: hk.sync_batch_norm(nn.Linear(2, 2)))

    class Activated(nn.BatchNorm2d):
        def forward(self, x: Any) -> Any:
            return super().forward(x).relu()

    assert "0 (Activated) has a forward of its own" in message(lambda: hk.sync_batch_norm(nn.Sequential(Activated(2))))
    assert type(hk.sync_batch_norm(synchronised)[0]).__name__ == "SyncBatchNorm"


class Augmented:
    """Random numbers that a DataLoader worker draws for a sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, _: int) -> Any:
        import torch

        return torch.rand(()), np.random.random(), random.random()  # noqa: S311


def draw(hk: Any, world: hvdkit.Topology, seed: int) -> tuple[list[float], list[float], list[float]]:
    """What a program gets that seeds: the first weights, a dropout, and all other random numbers."""
    import torch

    streams = hk.seed_everything(seed, world)
    model = make_model()
    first = flat(model.parameters())
    hk.broadcast_state(model)
    loader = hk.shard(Augmented(), world, 2, num_workers=2)
    drawn = [number for _ in range(2) for batch in loader for number in flat(batch)]
    drawn += [torch.rand(()).item(), np.random.random(), random.random(), streams.generator(1).random()]  # noqa: S311
    return first, torch.nn.Dropout(0.5)(torch.ones(64)).tolist(), drawn


@on_ranks("torch", n=3)
def test_seeds_give_the_same_model_and_different_streams_again_in_every_run(hk, world, everyone):
    first, again, other = (everyone(draw(hk, world, seed)) for seed in (11, 11, 12))
    assert first == again
    models = [model for model, _, _ in first]
    assert models[0] == models[1] == models[2] != other[0][0]
    runs = [*first, *other]
    numbers = [number for _, _, drawn in runs for number in drawn]
    # 6 runs of 4 draws, and of 2 epochs of 2 batches (of 8 samples on 3 ranks, 1 batch) of 2 samples of 3 draws
    assert len(set(numbers)) == len(numbers) == 6 * (4 + 2 * 1 * 2 * 3)
    assert len({tuple(dropout) for _, dropout, _ in runs}) == 6
    for bad in (-1, 1.5, True):
        found = message(lambda bad=bad: hk.seed_everything(bad, world))
        assert found.startswith("InvalidArgumentError: seed must be an integer >= 0")


@on_ranks("torch", n=3, fresh=True)  # it ends the watch of allreduces on all ranks
def test_join_waits_for_the_rank_with_the_most_steps(hk, world):
    training = Training(hk, world, "SGD")
    for _ in range(2 + world.rank):
        training.step()
    with patch.object(allreduce_counts, "_LEAVE_S", 0):  # the others may be slow to hear that this rank leaves
        assert hk.join(training.model, training.optimizer, world) == 2
    hk.check_agreement(training.model, training.optimizer, world, statistics=True)


@on_ranks("torch", n=2, fresh=True)
def test_a_second_init_loses_nothing_that_a_thread_waits_for(hk, world, everyone):
    """Horovod's own forgets it; rank 0 waits for what rank 1 shows within a second."""
    for again in (hk.init, hk.hvd.init):
        everyone(None)
        if world.rank == 0:
            allreduce_counts.COUNTS._told.set()
            time.sleep(0.1)
            again()
        time.sleep(1.5)
        assert everyone(allreduce_counts.COUNTS._thread.is_alive()) == [True, True]


def join_beside_a_watch_that_fails(hk, world):
    """Rank 0 would wait in ``join`` for what rank 1 no longer shows."""
    training = Training(hk, world, "SGD")
    if world.rank:  # when rank 0 has waited for a while: Horovod may lose what is sent just as it ends
        with patch.object(allreduce_counts.COUNTS, "_row", lambda: time.sleep(3) or 1 // 0):
            allreduce_counts.COUNTS._thread.join()
    hk.join(training.model, None, world)


@pytest.mark.parallel
def test_a_watch_that_fails_on_a_rank_is_an_error_on_every_rank(run_job, capfd):
    said = run_job("torch", join_beside_a_watch_that_fails, fails=True)
    assert all(f"rank {rank} of torch-2-gloo: Traceback" in said for rank in range(2)), said
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("hvdkit: the watch")]
    assert len(told) == 1 and "failed on rank 1: ZeroDivisionError" in told[0]


def stream(values: list[float]) -> Any:
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.tensor([value]), torch.tensor(value)) for value in values])

    return Stream()


@on_ranks("torch", n=2)
def test_streams_of_unknown_length_take_the_same_steps(hk, world):
    """Rank r's stream has 3 + 4 * r samples, in batches of 2."""
    own = stream([10.0 * world.rank + number for number in range(3 + 4 * world.rank)])
    dropped = [y.tolist() for _, y in hk.shard(own, world, 2)]
    exact = [[y.tolist(), w.tolist()] for _, y, w in hk.shard(own, world, 2, remainder="exact")]
    if world.rank == 0:
        assert dropped == [[0.0, 1.0]]
        assert exact == [
            [[0.0, 1.0], [1.0, 1.0]],
            [[2.0], [pytest.approx(2 / 3)]],
            [[2.0], [0.0]],
            [[2.0], [0.0]],
        ]
    else:
        assert dropped == [[10.0, 11.0]]
        assert exact == [
            [[10.0, 11.0], [1.0, 1.0]],
            [[12.0, 13.0], [pytest.approx(4 / 3)] * 2],
            [[14.0, 15.0], [2.0, 2.0]],
            [[16.0], [2.0]],
        ]
    empty = stream([1.0] if world.is_root else [])
    found = message(lambda: list(hk.shard(empty, world, 2, remainder="exact")))
    assert "the data set of rank 1 is empty" in found
    assert "remainder must be drop or exact" in message(lambda: hk.shard(own, world, 2, remainder="pad"))
    assert "batch_size must be an integer >= 1, got 0" in message(lambda: hk.shard(own, world, 0))


@on_ranks("torch", n=1)
def test_weighted_losses(hk):
    import torch
    from torch import nn

    output, target = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 0, 1])
    weights = torch.tensor([1.5, 0.5, 0.0], dtype=torch.float64)
    each = nn.functional.cross_entropy(output, target, reduction="none")
    loss, expected = nn.CrossEntropyLoss, float((each * weights).mean())
    own = loss(reduction="none")
    for one in (loss(), loss(reduction="none"), nn.functional.cross_entropy, lambda o, t: own(o, t)):
        assert float(hk.weighted_loss(one)(output, target, weights)) == pytest.approx(expected)
    assert float(hk.weighted_loss(loss())(output, target)) == pytest.approx(float(each.mean()))
    pixels, truth = torch.rand(3, 2, 4), torch.rand(3, 2, 4)
    squares = (pixels - truth).pow(2).flatten(1).mean(1)
    images = float(hk.weighted_loss(nn.MSELoss())(pixels, truth, weights))
    assert images == pytest.approx(float((squares * weights).mean()), abs=1e-7)
    refused = {
        "got 'sum'": lambda: hk.weighted_loss(loss(reduction="sum")),
        "class weights divides": lambda: hk.weighted_loss(loss(weight=torch.ones(2))),
        "ignore_index=-100": lambda: hk.weighted_loss(loss())(output, torch.tensor([0, 1, -100]), weights),
        "got (2,) for (3,)": lambda: hk.weighted_loss(loss())(output, target, weights[:2]),
        "a single number": lambda: hk.weighted_loss(lambda o, t: o.sum())(output, target, weights),
    }
    for part, attempt in refused.items():
        assert message(attempt).startswith("InvalidArgumentError") and part in message(attempt)


@on_ranks("torch", n=1)
def test_what_is_no_interval_reaction_or_loader_is_refused(hk):
    from torch import nn

    alone, model = hvdkit.Topology(0, 1), nn.Linear(2, 2)
    assert message(lambda: hk.CheckAgreement(model, None, alone, every=0)).endswith(", got 0.")
    assert message(lambda: hk.CheckAgreement(model, None, alone, on_disagreement="stop")).endswith(", got 'stop'.")
    assert message(lambda: hk.check_agreement(model, None, alone, loader=[1])).endswith(", got list.")


@on_ranks("torch", n=1)
def test_digests_tell_every_type_and_shape_apart(hk):
    """A changed bit, and equal tensors that lie elsewhere in memory or on a device."""
    import torch

    from hvdkit.steps import torch_tensors as inside

    torch.manual_seed(0)
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8]
    for dtype in (*types, torch.complex64, torch.complex128):
        for shape in ((), (0,), (1,), (7,), (3, 5), (70001,), (2, 70001)):
            tensor = (3 * torch.randn(shape)).to(dtype)
            changed = tensor.clone()
            expected = inside.digests([tensor]).item()
            if changed.numel():
                changed.reshape(-1)[changed.numel() // 2 :][:1].view(torch.uint8)[0] ^= 64
            moved = torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:].reshape(shape)
            plain = tensor.view(torch.int16) if dtype == torch.bfloat16 else tensor
            on_device = inside.digest_on_device(tensor, agreement.CHUNK).item()
            assert agreement.array_digests([plain.numpy()]).item() == on_device == expected, (dtype, shape)
            assert (inside.digests([changed]).item() != expected) == bool(changed.numel()), (dtype, shape)
            assert inside.digests([moved]).item() == expected, (dtype, shape)
    strided, flags = torch.randn(9, 4), torch.tensor([True, False, False, True])
    turned = strided[::2].T
    assert inside.digests([turned, flags]).tolist() == inside.digests([turned.contiguous(), flags.clone()]).tolist()
    assert inside.digests([flags]) != inside.digests([~flags])
