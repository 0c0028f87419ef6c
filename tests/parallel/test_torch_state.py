"""PyTorch's state: the same objects, the same bits on every rank, and put back from checkpoints whole or not at all."""

import itertools
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs_checks import message
from ranks import on_ranks

import hvdkit
from hvdkit.steps.checkpoint import CheckpointDirectory

FEATURES = 4


def make_model(seed: int, dtype: str = "float32") -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers = nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).to(getattr(torch, dtype))


def step(model: Any, optimizer: Any, seed: int) -> None:
    import torch

    def closure() -> Any:
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        loss = model(torch.randn(8, FEATURES, generator=generator)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def bits(value: Any) -> Any:
    """Nested values, tensors as type, shape and bytes."""
    import torch

    if isinstance(value, torch.nn.Module):
        return bits({name: tensor for name, tensor in value.state_dict().items()})
    if isinstance(value, torch.optim.Optimizer):
        return bits(value.state_dict())
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return "sparse", bits(value.coalesce().indices()), bits(value.coalesce().values())
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), bytes(flat.tolist())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(bits(item) for item in value)
    return repr(value)


def objects(optimizer: Any) -> list[Any]:
    """What a scheduler or the user may hold: the groups, the states and the tensors in them."""
    import torch

    states = list(optimizer.state.values())
    held = [optimizer.param_groups, optimizer.state, *optimizer.param_groups, *states]
    for one in (*optimizer.param_groups, *states):
        held += [value for value in one.values() if isinstance(value, torch.Tensor)]
    return held


def two_groups(kind: str, model: Any, rate: Any, **options: Any) -> Any:
    import torch

    groups = [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[3].parameters()]}]
    return getattr(torch.optim, kind)(groups, lr=rate, **options)


def optimizers(rank: int) -> dict[str, Any]:
    """By name, a function of the model."""
    import torch

    rate = 0.01 * (rank + 1)
    return {
        "no state": lambda model: two_groups("SGD", model, rate),
        "momentum": lambda model: two_groups("SGD", model, rate, momentum=0.9 / (rank + 1)),
        "adam": lambda model: two_groups("Adam", model, rate, betas=(0.9, 0.99 + rank / 1000)),
        "tensor rate": lambda model: two_groups("Adam", model, torch.tensor(rate), foreach=False),
        "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=rate),
    }


@on_ranks("torch", n=3)
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_changes_an_optimizer_in_place(hk, world, everyone, root):
    """Whoever has stepped before: then it has other objects than one that has not, and keeps them."""
    import torch

    for kind, stepped in itertools.product(optimizers(0), ("none", "root", "others", "all")):
        model = make_model(world.rank)
        optimizer = optimizers(world.rank)[kind](model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if stepped == "all" or (stepped != "none" and (world.rank == root) == (stepped == "root")):
            step(model, optimizer, world.rank)
            schedule.step()
        wanted, held = everyone((bits(model), bits(optimizer)))[root], objects(optimizer)
        hk.broadcast_state(model, optimizer, root)
        assert everyone((bits(model), bits(optimizer))) == [wanted] * world.size, (kind, stepped)
        kept = 2 + len(optimizer.param_groups)
        assert [id(one) for one in objects(optimizer)[:kept]] == [id(one) for one in held[:kept]]
        assert [one["lr"] for one in schedule.optimizer.param_groups] == [one["lr"] for one in optimizer.param_groups]
        if stepped == "all":
            assert [id(one) for one in objects(optimizer)] == [id(one) for one in held], kind
        hk.check_agreement(model, optimizer, world)


@on_ranks("torch", n=2)
def test_a_scheduler_made_before_distribute_and_broadcast_steers_every_rank(hk, world, everyone):
    import torch

    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer = hk.distribute(optimizer, model)
    hk.broadcast_state(model, optimizer)
    for number in range(3):
        step(model, optimizer, world.rank + number)
        schedule.step()
    assert everyone(optimizer.param_groups[0]["lr"]) == [0.1 * 0.5**3] * world.size
    hk.check_agreement(model, optimizer, world)


@on_ranks("torch", n=3)
def test_broadcast_sends_every_kind_of_state_bit_for_bit(hk, world, everyone):
    """Slots of another type than their parameter's, too: PyTorch's load_state_dict would round them to it."""
    import torch

    model = torch.nn.ParameterDict({
        "low": torch.nn.Parameter(torch.full((3,), 1.0 + world.rank, dtype=torch.bfloat16)),
        "wave": torch.nn.Parameter(torch.full((2,), complex(1, world.rank))),
        "none": torch.nn.Parameter(torch.zeros(0)),
    })  # fmt: skip
    shared = torch.tensor(0.5 + world.rank)
    optimizer = torch.optim.SGD([{"params": one, "lr": shared} for one in model.values()], lr=0.1)
    if world.rank != 2:
        nan = torch.tensor([float("nan"), -0.0, float("inf")])
        optimizer.state[model["low"]].update(
            master=torch.tensor([1 / 3, 2.0**-140, 1e30]) + world.rank,
            step=torch.tensor(0 if world.is_root else 1.0), odd=nan,
            flags=torch.tensor([True, False]), transposed=torch.arange(6.0).reshape(2, 3).T * (1 + world.rank),
            history=[torch.ones(2), (None, torch.zeros(1), {"deep": torch.tensor(3 + world.rank)})],
        )  # fmt: skip
        first, kept = torch.ones(1), torch.zeros(3, dtype=torch.bfloat16)
        optimizer.state[model["low"]].update(
            one=first, two=torch.zeros(1) if world.is_root else first, kept=kept if world.is_root else model["low"]
        )
        sparse = torch.sparse_coo_tensor([[1]], [2.0 + world.rank], (4,))
        optimizer.state[model["wave"]].update(sparse=sparse, slot=torch.tensor([1j * world.rank]))
        optimizer.state["global"] = {"count": world.rank, "best": float("-inf")}
    wanted = everyone((bits(dict(model)), bits(optimizer)))[0]
    hk.broadcast_state(model, optimizer)
    assert everyone((bits(dict(model)), bits(optimizer))) == [wanted] * 3
    rates = [group["lr"] for group in optimizer.param_groups]
    assert all(rate is shared for rate in rates)  # as on the root; a fill_ of one is one of all


@on_ranks("torch", n=3)
def test_optimizers_that_differ_are_one_error_on_every_rank(hk, world, everyone):
    import torch

    model = make_model(0)
    parameters = list(model.parameters())
    half, last = len(parameters) // 2, world.rank == world.size - 1
    whole = torch.optim.SGD(parameters, lr=0.1)

    def groups(at: int) -> Any:
        return torch.optim.SGD([{"params": parameters[:at]}, {"params": parameters[at:]}], lr=0.1)

    for usual, other in (
        (whole, groups(half)),
        (groups(half), groups(half + 1)),
        (whole, torch.optim.SGD(parameters[:-1], lr=0.1)),
        (whole, torch.optim.Adam(parameters)),
        (whole, None),
    ):
        with pytest.raises(hvdkit.AgreementError, match=r"hold different models or optimizers: rank .* build the same"):
            hk.broadcast_state(model, other if last else usual)
        everyone("refused")


@on_ranks("torch", n=3)
def test_an_optimizer_distributed_on_one_rank_alone_is_an_error_on_all(hk, world):
    import torch

    model = torch.nn.Linear(FEATURES, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if world.rank == 1:
        hk.distribute(optimizer, model)
    error = message(lambda: hk.broadcast_state(model, optimizer))
    assert "SGD (distributed) group 0" in error if world.rank == 1 else "SGD group 0" in error
    assert "hold different models or optimizers: rank" in error
    for _ in range(2 if world.is_root else 1):  # one more than others have is harmless
        optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)
    hk.broadcast_state(model, optimizer)
    model(torch.full((2, FEATURES), float(world.rank))).sum().backward()
    optimizer.step()
    hk.check_agreement(model, optimizer, world)


@on_ranks("torch", n=2)
def test_an_optimizer_around_another_is_broadcast_in_its_own_way(hk, world, everyone):
    import torch

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {})
            self.param_groups = inner.param_groups

        def state_dict(self) -> Any:
            return self.inner.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.inner.load_state_dict(state)
            self.param_groups = self.inner.param_groups

    model = make_model(world.rank)
    inner = torch.optim.Adam(model.parameters(), lr=0.1 * (world.rank + 1))
    step(model, inner, world.rank)
    optimizer = Around(inner)
    wanted = everyone(bits(inner))[0]
    hk.broadcast_state(model, optimizer)
    assert everyone(bits(inner)) == [wanted] * 2 and optimizer.param_groups is inner.param_groups


@on_ranks("torch", n=2)
def test_an_elastic_training_goes_back_in_place(hk, world, everyone):
    import torch

    model = make_model(0)
    optimizer = hk.distribute(two_groups("Adam", model, torch.tensor(0.1), foreach=False), model)
    loader = hk.shard(torch.utils.data.TensorDataset(torch.zeros(40, FEATURES)), world, 4)
    hk.broadcast_state(model, optimizer)
    step(model, optimizer, world.rank)
    elastic = hk.ElasticState(model, optimizer, loader=loader)
    for _ in range(2):
        committed, held = (bits(model), bits(optimizer)), objects(optimizer)
        step(model, optimizer, world.rank)
        optimizer.param_groups[0]["lr"].fill_(7)
        elastic.restore()
        assert (bits(model), bits(optimizer)) == committed
        assert [id(one) for one in objects(optimizer)] == [id(one) for one in held]
    step(model, optimizer, world.rank)
    elastic.sync()
    hk.check_agreement(model, optimizer, world)


# Checkpoints ----------------------------------------------------------------------------------------------------------


class Run:
    """A training with all that a checkpoint holds."""

    def __init__(self, hk: Any, world: Any, directory: Path, seed: int = 0, data_seed: int = 0, **options: Any) -> None:
        import torch

        hk.seed_everything(seed, world)
        self.model = make_model(seed)
        self.optimizer = hk.distribute(two_groups("AdamW", self.model, 0.1, weight_decay=0.1), self.model)
        hk.broadcast_state(self.model, self.optimizer)
        self.loader = hk.shard(torch.utils.data.TensorDataset(torch.zeros(40, FEATURES)), world, 4, seed=data_seed)
        self.schedule = hk.warmup(self.optimizer, world, len(self.loader), 2)
        self.checkpoints = hk.Checkpoints(directory, **options)

    def train(self, steps: int, seed: int) -> None:
        for number, _ in zip(range(steps), self.loader, strict=False):
            step(self.model, self.optimizer, seed + number)
            self.schedule.step()

    def restore(self, **options: Any) -> Any:
        given = {"loader": self.loader, "schedule": self.schedule, **options}
        return self.checkpoints.restore(given.pop("model", self.model), given.pop("optimizer", self.optimizer), **given)

    def everything(self) -> Any:
        import torch

        drawn = random.getstate(), np.random.get_state()[1].tolist(), bits(torch.get_rng_state())
        where = self.loader.state(), self.schedule.last_epoch, self.schedule.get_last_lr()
        return bits(self.model), bits(self.optimizer), drawn, where


def extras(model: Any) -> dict[str, Any]:
    """What people keep beside a model and an optimizer."""
    import torch

    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(other)
    plateau.step(np.float64(3.5))  # NumPy's number: "best" is one now
    linear = torch.optim.lr_scheduler.LinearLR(other)
    chain = torch.optim.lr_scheduler.SequentialLR(
        other, [linear, torch.optim.lr_scheduler.MultiStepLR(other, [2, 5])], [3]
    )
    return {
        "ema": average.state_dict(),
        "scaler": {"scale": float("inf"), "growth_factor": 2.0, "_growth_tracker": 3},
        "plateau": plateau.state_dict(),
        "chain": chain.state_dict(),
        "nested": {
            "one": torch.tensor([1.5]),
            "list": [1, ("a", torch.arange(3)), {"deep": torch.tensor(1 / 3)}],
            0: None,
            "0": "text",
        },
        "nested.one": torch.tensor([2.5]),
        "numbers": [float("nan"), float("-inf"), np.float32(0.5), np.int64(7), True, 2j, b"bytes", 10**30],
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j]),
        "empty": {},
    }


@on_ranks("torch", n=2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_extra_is_saved_and_given_back_on_every_rank(hk, world, everyone, tmp_path, asynchronous):
    run = Run(hk, world, tmp_path / "run", asynchronous=asynchronous)
    run.train(2, world.rank)
    plain = extras(run.model)
    saved = run.checkpoints.save(run.model, run.optimizer, step=2, loader=run.loader, extra=plain)
    if asynchronous:
        for tensor in plain["ema"].values():
            tensor.zero_()  # the training goes on
        saved = run.checkpoints.wait()
    assert saved.extra == {}
    other = Run(hk, world, tmp_path / "run", seed=5)
    found = other.restore()
    wanted = extras(run.model)
    wanted["plateau"]["best"], wanted["numbers"][2:4] = 3.5, [0.5, 7]
    assert everyone(bits(found.extra)) == [everyone(bits(wanted))[0]] * world.size
    assert type(found.extra["chain"]["_schedulers"][1]["milestones"]) is type(
        wanted["chain"]["_schedulers"][1]["milestones"]
    )
    import torch

    average = torch.optim.swa_utils.AveragedModel(other.model)
    average.load_state_dict(found.extra["ema"])
    assert bits(average) == bits(dict(found.extra["ema"]))
    versions = found.extra["ema"]._metadata
    assert versions["module.1"] == {"version": 2} and everyone(found.step) == [2] * world.size


@on_ranks("torch", n=2)
@pytest.mark.parametrize("workers", [0, 1])
def test_the_rest_of_an_epoch_draws_the_random_numbers_that_would_have_followed(
    hk, world, tmp_path, monkeypatch, workers
):
    """Without seed_everything a DataLoader draws the seed of its workers from the program's own when a pass begins."""
    import torch

    from hvdkit.torch import seeds

    monkeypatch.setattr(seeds.CURRENT, "seeds", None)
    loader = hk.shard(torch.utils.data.TensorDataset(torch.zeros(40)), world, 4, num_workers=workers)
    model, checkpoints = make_model(0), hk.Checkpoints(tmp_path / "run")
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 0.1), model)
    rest = iter(loader)
    next(rest)
    step(model, optimizer, 0)
    checkpoints.save(model, optimizer, step=1, loader=loader)
    next(rest)
    followed = torch.rand(3)
    checkpoints.restore(model, optimizer, loader=loader)
    next(iter(loader))
    assert torch.rand(3).equal(followed)


@on_ranks("torch", n=2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_sparse_tensor_is_saved(hk, world, tmp_path, asynchronous):
    import torch

    checkpoints = hk.Checkpoints(tmp_path / "run", asynchronous=asynchronous)
    model = torch.nn.Linear(2, 1)
    checkpoints.save(model, step=1, extra={"graph": torch.eye(3).to_sparse()})
    checkpoints.wait()
    assert checkpoints.restore(model).extra["graph"].to_dense().equal(torch.eye(3))


@on_ranks("torch", n=3)
def test_what_modules_keep_beside_tensors_goes_to_every_rank(hk, world, tmp_path):
    import torch

    class Scaled(torch.nn.Linear):
        seen = 0, torch.zeros(2)

        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    def make(number: int) -> Any:
        model = torch.nn.Sequential(Scaled(2, 1), Scaled(1, 1))
        model[1].seen = number, torch.full((2,), float(number))
        return model

    model, checkpoints = make(world.rank + 5), hk.Checkpoints(tmp_path / "run")
    hk.broadcast_state(model)
    assert model[1].seen[0] == 5 and model[1].seen[1].tolist() == [5.0, 5.0]
    checkpoints.save(model, step=1)
    other = make(world.rank + 7)
    checkpoints.restore(other)
    assert other[1].seen[0] == 5 and other[1].seen[1].tolist() == [5.0, 5.0]


@on_ranks("torch", n=2)
def test_what_cannot_be_saved_is_one_error_on_every_rank(hk, world, everyone, tmp_path):
    run = Run(hk, world, tmp_path / "run")

    def save(**given: Any) -> str:
        with pytest.raises(hvdkit.InvalidArgumentError) as refused:
            run.checkpoints.save(run.model, run.optimizer, step=1, **given)
        assert not list((tmp_path / "run").glob("*-*"))
        return str(refused.value)

    for given, told in (
        ({"extra": {"after": lambda: 1}}, "extra holds what cannot be saved and read again: "),
        ({"extra": {"path": tmp_path}}, "extra holds what cannot be saved and read again: Unsupported global"),
        ({"extra": {"array": np.zeros(3)}}, "extra holds what cannot be saved and read again: "),
        ({"extra": [1] if world.is_root else None}, "extra must be a dict of what to save by name, got list"),
        ({"loss": float("inf")}, "must be JSON values, got loss with Out of range float values"),
        ({"best": run.model}, "extra= saves tensors, state dicts and numbers that are inf or nan"),
    ):
        assert told in save(**given)
        everyone("refused")


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.write_text, (Path("exploded"), "")


@on_ranks("torch", n=2)
def test_a_checkpoint_that_does_not_fit_changes_nothing(hk, world, everyone, tmp_path):
    import torch

    run = Run(hk, world, tmp_path / "run")
    run.train(3, world.rank)
    run.checkpoints.save(run.model, run.optimizer, step=3, loader=run.loader, extra={"best": torch.ones(2)})
    root, *slots_and_others = everyone(bits(run.model))[0], *run.everything()[1:]
    run.checkpoints = hk.Checkpoints(tmp_path / "alone")
    run.checkpoints.save(run.model, step=3, loader=run.loader)

    def forge(name: str, at: str, contents: Any) -> Any:
        """A checkpoint like the first, but for a file."""
        found = CheckpointDirectory(tmp_path / "run").latest()

        def write(directory: Path) -> None:
            for file in found.path.glob("*.*"):
                if file.name not in ("manifest.json", at):
                    (directory / file.name).write_bytes(file.read_bytes())
            (directory / at).write_bytes(contents)

        if world.is_root:
            CheckpointDirectory(tmp_path / name).save(3, write, found.metadata)
        everyone("forged")
        return hk.Checkpoints(tmp_path / name)

    few = np.load(CheckpointDirectory(tmp_path / "run").latest().path / "random.npy")
    np.save(tmp_path / f"few-{world.rank}", few[:, :-7])
    usual, last = hk.Checkpoints(tmp_path / "run"), world.rank == world.size - 1
    other = Run(hk, world, tmp_path / "run", seed=3)
    other.train(2, world.rank + 9)
    twin = Run(hk, world, tmp_path / "run", seed=3, data_seed=1 if last else 0)
    wider = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 4)
    )
    parameters = list(other.model.parameters())
    late = hk.warmup(torch.optim.SGD(parameters[:1], lr=0.1), world, 5)
    late.optimizer.add_param_group({"params": parameters[1:2]})
    model = other.model
    elsewhere = hvdkit.AgreementError, f"rank {world.size - 1} failed, and the others stop with it: the checkpoint's"
    alone = hvdkit.CheckpointError, "the checkpoint's data had seed=0, this loader has 1"
    for given, checkpoints, (kind, told) in (
        ({"model": wider, "optimizer": None}, usual, (hvdkit.CheckpointError, "does not fit this Sequential")),
        (
            {"optimizer": torch.optim.AdamW(model.parameters())},
            usual,
            (hvdkit.CheckpointError, "does not fit this AdamW"),
        ),
        (
            {"optimizer": two_groups("Adam", model, 0.1)},
            usual,
            (hvdkit.CheckpointError, "state of AdamW, this optimizer is Adam;"),
        ),
        ({"loader": twin.loader}, usual, alone if last else elsewhere),
        ({"schedule": late}, usual, (hvdkit.InvalidArgumentError, "knows 1 parameter groups, its optimizer has 2")),
        (
            {"schedule": [1] if last else other.schedule},
            usual,
            (hvdkit.InvalidArgumentError if last else hvdkit.AgreementError, "must be from warmup"),
        ),
        ({}, hk.Checkpoints(tmp_path / "alone"), (hvdkit.CheckpointError, "optimizer.pt")),
        ({}, forge("bomb", "extra.pt", pickle.dumps(Bomb())), (hvdkit.CheckpointError, "extra.pt")),
        ({}, forge("torn", "extra.pt", b"nothing"), (hvdkit.CheckpointError, "extra.pt")),
        (
            {},
            forge("few", "random.npy", (tmp_path / f"few-{world.rank}.npy").read_bytes()),
            (hvdkit.CheckpointError, "random states of another PyTorch"),
        ),
    ):
        other.checkpoints = checkpoints
        before, widest = other.everything(), bits(wider)
        held = [id(one) for one in objects(other.optimizer)]
        with pytest.raises(kind) as refused:
            other.restore(**given)
        assert told in str(refused.value)
        assert other.everything() == before and bits(wider) == widest, told
        assert [id(one) for one in objects(other.optimizer)] == held
        assert everyone(Path("exploded").exists()) == [False] * world.size
    other.checkpoints = usual
    assert other.restore().step == 3
    assert other.everything() == (root, *slots_and_others)
    assert [id(one) for one in objects(other.optimizer)] == held


# Compiled models ------------------------------------------------------------------------------------------------------


def compiled(model: Any, how: str) -> Any:
    """``model``, or it wrapped as ``torch.compile`` does: as a whole, a part of it, or both."""
    import torch

    if how in ("part", "both"):
        model[1] = torch.compile(model[1], backend="eager")
    return torch.compile(model, backend="eager") if how in ("whole", "both") else model


@on_ranks("torch", n=2)
@pytest.mark.parametrize(("one", "other"), [("plain", "whole"), ("whole", "part"), ("both", "plain")])
def test_a_compiled_models_state_has_the_names_of_the_plain_one(hk, world, everyone, tmp_path, one, other):
    import torch

    models = [compiled(make_model(seed), how) for seed, how in ((1, one), (2, other))]
    assert len({tuple(model.state_dict()) for model in models}) == 2
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    hk.broadcast_state(models[0])
    step(models[0], optimizers[0], 0)
    store = hk.Checkpoints(tmp_path / "run")
    saved = store.save(models[0], optimizers[0], step=1)
    file = torch.load(saved.path / "model.pt", weights_only=True)
    assert list(file) == list(make_model(0).state_dict()) and file._metadata["1"] == {"version": 2}
    assert set(file._metadata) == set(make_model(0).state_dict()._metadata)
    store.restore(models[1], optimizers[1])
    values = [list(bits(model).values()) for model in models]
    assert values[0] == values[1] and bits(optimizers[0]) == bits(optimizers[1])


@on_ranks("torch", n=2)
def test_ranks_of_which_one_compiles_its_model_are_alike(hk, world, everyone):
    import torch

    for how in ("whole", "part", "both"):
        model = compiled(make_model(world.rank), how if world.rank == 1 else "plain")
        optimizer = hk.distribute(torch.optim.Adam(model.parameters(), lr=0.1), model)
        hk.broadcast_state(model, optimizer)
        step(model, optimizer, world.rank)
        hk.check_agreement(model, optimizer, world)
        with pytest.raises(hvdkit.AgreementError, match=r"1\.running_mean differs"):
            hk.check_agreement(model, optimizer, world, statistics=True)
        hk.average_statistics(model)
        hk.check_agreement(model, optimizer, world, statistics=True)


# The root fails -------------------------------------------------------------------------------------------------------


@on_ranks("torch", n=3)
def test_whatever_the_root_raises_every_rank_raises(hk, world, everyone, tmp_path):
    """None waits for a root that has failed, and all can go on together."""
    import torch

    class Failing(torch.nn.Linear):
        error: BaseException = KeyError("loss")

        def state_dict(self, *arguments: Any, **options: Any) -> Any:
            if world.is_root:
                raise self.error
            return super().state_dict(*arguments, **options)

    model, store = Failing(2, 2), hk.Checkpoints(tmp_path / "run")
    for error in (KeyError("loss"), OSError(5, "input/output error"), ZeroDivisionError()):
        model.error = error
        with pytest.raises(type(error) if world.is_root else hvdkit.RootError) as failed:
            store.save(model, step=1)
        if not world.is_root:
            assert type(error).__name__ in str(failed.value) and str(error) in str(failed.value)
        assert everyone("failed") == ["failed"] * world.size
    model.error = SystemExit(3)
    with pytest.raises(SystemExit) as ended:
        store.save(model, step=1)
    assert everyone(ended.value.code) == [3] * world.size

    optimizer = torch.optim.SGD([{"params": model.parameters(), "odd": (one for one in "x")}], lr=0.1)
    with pytest.raises(TypeError if world.is_root else hvdkit.RootError, match="cannot pickle"):
        hk.broadcast_state(model, optimizer)
    hk.check_agreement(model, None, world)


@on_ranks("torch", n=2)
def test_several_models_or_optimizers_are_one_sentence(hk, world, everyone, tmp_path):
    import torch

    model, store = torch.nn.Linear(2, 2), hk.Checkpoints(tmp_path / "run")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, expected in (
        (({"a": model},), "got dict; put several into one"),
        ((model, [optimizer]), "got list; broadcast several one by one"),
    ):
        for call in (hk.broadcast_state, lambda *these: store.save(*these, step=1), store.restore):
            with pytest.raises(hvdkit.InvalidArgumentError, match=expected):
                call(*given)
    both = torch.nn.ModuleDict({"generator": model, "critic": torch.nn.Linear(2, 1)})
    hk.broadcast_state(both, optimizer)
    store.save(both, optimizer, step=1, extra={"critic": optimizer.state_dict()})
    assert everyone(store.restore(both, optimizer).extra["critic"]["param_groups"][0]["lr"]) == [0.1] * world.size
