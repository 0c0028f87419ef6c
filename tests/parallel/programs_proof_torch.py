"""What the ranks of test_proof_torch.py do; each function returns JSON values."""

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from programs_checks import signs
from torch import nn

import hvdkit
import hvdkit.torch as hk
from hvdkit.steps import agreement
from hvdkit.torch import agreement as torch_agreement

FEATURES, CLASSES = 4, 3


def make_data(samples: int = 24) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def flat(tensors: Any) -> list[float]:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).tolist()


def message(attempt: Callable[[], Any]) -> str:
    """The error of an attempt, "" where there was none."""
    try:
        attempt()
    except hvdkit.HvdkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Training:
    """One training on all ranks, step by step."""

    def __init__(self, world: hvdkit.Topology, optimizer: Any = torch.optim.Adam) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.optimizer = hk.distribute(optimizer(self.model.parameters(), lr=0.01), self.model)
        hk.broadcast_state(self.model, self.optimizer)
        self.loader = hk.shard(make_data(), world, 4)

    def step(self) -> None:
        x, y = next(iter(self.loader))
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()


def injected(reaction: str) -> dict[str, Any]:
    """After step 3, one element of a weight on rank 1 is 1e-4 larger; checked every second step."""
    world = hk.init()
    training = Training(world)
    check = hk.CheckAgreement(training.model, training.optimizer, world, every=2, on_disagreement=reaction)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(1, 7):
            training.step()
            if step == 3 and world.rank == 1:
                with torch.no_grad():
                    training.model[4].weight[2, 5] += 1e-4
            error = message(check.step)
            if error:
                break
    return {"error": error, "steps": step, "warned": [str(one.message) for one in warned]}


def disagreements() -> dict[str, str]:
    """For each thing that only the last rank changes: what check_agreement says."""
    world = hk.init()
    hk.seed_everything(3, world)
    training = Training(world)
    hk.seed_everything(3, world)  # Training has seeded PyTorch itself
    training.step()

    def plant(training: Training, kind: str) -> None:
        slots = training.optimizer.state[training.model[0].weight]
        with torch.no_grad():
            if kind == "slot":
                slots["exp_avg"][0, 0] += 1e-4
            elif kind == "rate":
                training.optimizer.param_groups[0]["lr"] = 0.02
            elif kind == "epoch":
                training.loader.set_epoch(7)
            elif kind == "buffer":
                training.model.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16) * 2)
            elif kind == "sign of zero":
                training.model.register_buffer("scale", -torch.zeros(2, dtype=torch.bfloat16))
            elif kind == "seed":
                hk.seed_everything(4, world)
            elif kind == "seeded anew":
                torch.manual_seed(0)

    found = {}
    for kind in ("nothing", "slot", "rate", "epoch", "buffer", "sign of zero", "seed", "seeded anew"):
        before = training.model.state_dict()
        slots = training.optimizer.state_dict()
        training.model.register_buffer("scale", torch.zeros(2, dtype=torch.bfloat16))
        if world.rank == world.size - 1:
            plant(training, kind)
        found[kind] = message(
            lambda: hk.check_agreement(training.model, training.optimizer, world, loader=training.loader)
        )
        del training.model.scale
        training.model.load_state_dict(before)
        training.optimizer.load_state_dict(slots)
        training.optimizer.param_groups[0]["lr"] = 0.01
        hk.broadcast_state(training.model, training.optimizer)
        training.loader.set_epoch(1)
        hk.seed_everything(3, world)
    torch.manual_seed(5)
    found["all seeded anew"] = message(lambda: hk.check_agreement(training.model, None, world))
    hk.seed_everything(3, world)
    for kind, values in signs(world.rank).items():
        flipped = nn.Module()
        flipped.register_buffer("signs", torch.from_numpy(values))
        found[kind] = message(lambda flipped=flipped: hk.check_agreement(flipped, None, world))
    return found


def statistics() -> dict[str, Any]:
    """BatchNorm's running statistics of each rank, then averaged, then those of the global batch."""
    world = hk.init()
    training = Training(world)
    training.step()
    local = training.model[1].running_mean.tolist()
    found = {
        "local": local,
        "checked": message(lambda: hk.check_agreement(training.model, training.optimizer, world)),
        "with statistics": message(
            lambda: hk.check_agreement(training.model, training.optimizer, world, statistics=True)
        ),
    }
    hk.average_statistics(training.model)
    found["averaged"] = training.model[1].running_mean.tolist()
    found["after averaging"] = message(lambda: hk.check_agreement(training.model, None, world, statistics=True))
    synchronised = hk.sync_batch_norm(nn.Sequential(nn.BatchNorm2d(2, momentum=None), nn.Flatten()))
    whole = nn.Sequential(nn.BatchNorm2d(2, momentum=None), nn.Flatten())
    images = torch.randn(2 * world.size, 2, 3, 3, generator=torch.Generator().manual_seed(4))
    for _ in range(2):
        mine = synchronised(images[world.rank :: world.size])
        expected = whole(images)[world.rank :: world.size]
    found["off"] = float((mine - expected).abs().max())
    found["running"] = [flat([net[0].running_mean, net[0].running_var]) for net in (synchronised, whole)]
    found["evaluated"] = float((synchronised.eval()(images) - whole.eval()(images)).abs().max())
    found["synchronised"] = message(lambda: hk.check_agreement(synchronised, None, world))
    found["none"] = message(lambda: hk.sync_batch_norm(nn.Linear(2, 2)))
    return found


class Augmented(torch.utils.data.Dataset):
    """Random numbers that a DataLoader worker draws for a sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, _: int) -> Any:
        return torch.rand(()), np.random.random(), random.random()  # noqa: S311


def seeds(seed: int) -> dict[str, Any]:
    world = hk.init()
    streams = hk.seed_everything(seed, world)
    model = make_model()
    first = flat(model.parameters())
    hk.broadcast_state(model)
    loader = hk.shard(Augmented(), world, 2, num_workers=2)
    workers = [flat(batch) for _ in range(2) for batch in loader]
    return {
        "initial": first,
        "drawn": [torch.rand(()).item(), np.random.random(), random.random(), streams.generator(1).random()],  # noqa: S311
        "dropout": nn.Dropout(0.5)(torch.ones(64)).tolist(),
        "workers": workers,
        "bad": [message(lambda bad=bad: hk.seed_everything(bad, world)) for bad in (-1, 1.5, True)],
    }


def joined() -> dict[str, Any]:
    """Rank r takes 2 + r steps."""
    world = hk.init()
    training = Training(world, torch.optim.SGD)
    for _ in range(2 + world.rank):
        training.step()
    last = hk.join(training.model, training.optimizer, world)
    hk.check_agreement(training.model, training.optimizer, world, statistics=True)
    return {"last": last, "weights": flat(training.model.parameters())}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, values: list[float]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([value]), torch.tensor(value)) for value in self._values])


def streams() -> dict[str, Any]:
    """Rank r's stream has 3 + 4 * r samples, in batches of 2."""
    world = hk.init()
    own = Stream([10.0 * world.rank + number for number in range(3 + 4 * world.rank)])
    dropped = [y.tolist() for _, y in hk.shard(own, world, 2)]
    exact = [(y.tolist(), w.tolist()) for _, y, w in hk.shard(own, world, 2, remainder="exact")]
    empty = Stream([1.0] if world.is_root else [])
    return {
        "drop": dropped,
        "exact": exact,
        "empty": message(lambda: list(hk.shard(empty, world, 2, remainder="exact"))),
        "pad": message(lambda: hk.shard(own, world, 2, remainder="pad")),
        "size": message(lambda: hk.shard(own, world, 0)),
    }


def losses() -> dict[str, Any]:
    output, target = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 0, 1])
    weights = torch.tensor([1.5, 0.5, 0.0], dtype=torch.float64)
    each = nn.functional.cross_entropy(output, target, reduction="none")
    loss = nn.CrossEntropyLoss
    own = loss(reduction="none")
    pixels, truth = torch.rand(3, 2, 4), torch.rand(3, 2, 4)
    squares = (pixels - truth).pow(2).flatten(1).mean(1)
    return {
        "expected": float((each * weights).mean()),
        "means": [
            float(hk.weighted_loss(one)(output, target, weights))
            for one in (loss(), loss(reduction="none"), nn.functional.cross_entropy, lambda o, t: own(o, t))
        ],
        "unweighted": float(hk.weighted_loss(loss())(output, target)) - float(each.mean()),
        "images": float(hk.weighted_loss(nn.MSELoss())(pixels, truth, weights) - (squares * weights).mean()),
        "untouched": nn.CrossEntropyLoss().reduction,
        "errors": [
            message(lambda: hk.weighted_loss(loss(reduction="sum"))),
            message(lambda: hk.weighted_loss(loss(weight=torch.ones(2)))),
            message(lambda: hk.weighted_loss(loss())(output, torch.tensor([0, 1, -100]), weights)),
            message(lambda: hk.weighted_loss(loss())(output, target, weights[:2])),
            message(lambda: hk.weighted_loss(lambda o, t: o.sum())(output, target, weights)),
        ],
        "every": [
            message(lambda: hk.CheckAgreement(nn.Linear(2, 2), None, hvdkit.Topology(0, 1), every=0)),
            message(lambda: hk.CheckAgreement(nn.Linear(2, 2), None, hvdkit.Topology(0, 1), on_disagreement="stop")),
            message(lambda: hk.check_agreement(nn.Linear(2, 2), None, hvdkit.Topology(0, 1), loader=[1])),
        ],
    }  # fmt: skip


def digests() -> list[str]:
    """Types and shapes for which check_agreement's digest misses a changed bit, or tells equal tensors apart."""
    failed = []
    torch.manual_seed(0)
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8]
    for dtype in (*types, torch.complex64, torch.complex128):
        for shape in ((), (0,), (1,), (7,), (3, 5), (70001,), (2, 70001)):
            tensor = (3 * torch.randn(shape)).to(dtype)
            changed = tensor.clone()
            expected = torch_agreement.digest(tensor).item()
            if changed.numel():
                changed.reshape(-1)[changed.numel() // 2 :][:1].view(torch.uint8)[0] ^= 64
            moved = torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:].reshape(shape)  # elsewhere in memory
            plain = tensor.view(torch.int16) if dtype == torch.bfloat16 else tensor
            on_device = torch_agreement.digest_on_device(tensor, agreement.CHUNK).item()
            if agreement.array_digests([plain.numpy()]).item() != expected or on_device != expected:
                failed.append(f"{dtype} {shape} on a device")
            differs = torch_agreement.digest(changed).item() != expected
            if differs != bool(changed.numel()) or torch_agreement.digest(moved).item() != expected:
                failed.append(f"{dtype} {shape}")
    strided, flags = torch.randn(9, 4), torch.tensor([True, False, False, True])
    if torch_agreement.digest(strided[::2].T).item() != torch_agreement.digest(strided[::2].T.contiguous()).item():
        failed.append("strided")
    if torch_agreement.digest(flags).item() == torch_agreement.digest(~flags).item():
        failed.append("bool")
    return failed
