"""An optimizer's state divided among the ranks (``shard_state=True``) in PyTorch: equal, 1 / n on each rank."""

import copy
import os
import signal
import warnings
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

STEPS = 6
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "foreach": False},
    "AdamW fused": {"lr": 0.01, "fused": True},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Adagrad": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Adadelta": {},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},  # needs whole matrices
}


def net(dtype: Any = None) -> Any:
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 21),
        torch.nn.ReLU(),
        torch.nn.Linear(21, 10),
    )
    return model.to(dtype or torch.float64)


def loss_of(model: Any, world: Any, step: int) -> Any:
    """Of this rank's rows of a global batch of 12, which are the same rows on any number of ranks."""
    import torch

    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 1, 8, 8, generator=generator)[world.rank :: world.size]
    y = torch.randint(10, (12,), generator=generator)[world.rank :: world.size]
    return torch.nn.functional.cross_entropy(model(x.to(next(model.parameters()))), y)


def weights(model: Any) -> Any:
    import torch

    return torch.cat([one.detach().double().reshape(-1) for one in model.parameters()]).numpy()


def made(name: str, parameters: Any) -> Any:
    import torch

    return getattr(torch.optim, name.split()[0])(parameters, **OPTIMIZERS[name])


def trained(hk: Any, world: Any, optimizer_of: Any, *, sharded: bool, model: Any = None, **options: Any) -> Any:
    import torch

    model = model or net()
    optimizer = hk.distribute(optimizer_of(model), model, shard_state=sharded, **options)
    hk.broadcast_state(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, world, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    hk.check_agreement(model, optimizer, world)
    return model, optimizer


@on_ranks("torch", n=2)
def test_an_optimizer_of_matrices_gets_whole_ones(hk, world):
    import torch

    def matrices() -> Any:
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 33, bias=False), torch.nn.Linear(33, 10, bias=False)
        ).double()

    def run(sharded: bool) -> Any:
        model, _ = trained(
            hk, world, lambda model: torch.optim.Muon(model.parameters(), lr=0.01), sharded=sharded, model=matrices()
        )
        return weights(model)

    np.testing.assert_allclose(run(True), run(False), rtol=0, atol=1e-12)


def numbers_kept(optimizer: Any) -> int:
    """Of all slots but step counters."""
    slots = [slot for state in optimizer.state.values() for slot in state.values()]
    return sum(slot.numel() for slot in slots if getattr(slot, "ndim", 0))


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks("torch", n=(2, 3))
def test_weights_are_those_of_the_undivided_and_the_state_is_a_share(hk, world, name):
    whole, undivided = trained(hk, world, lambda model: made(name, model.parameters()), sharded=False)
    found, divided = trained(hk, world, lambda model: made(name, model.parameters()), sharded=True)
    np.testing.assert_allclose(weights(found), weights(whole), rtol=0, atol=1e-12)
    assert numbers_kept(undivided) > 0
    if name != "Adafactor":
        assert numbers_kept(divided) == pytest.approx(numbers_kept(undivided) / world.size, rel=0.05)


@on_ranks("torch", n=2)
def test_groups_accumulation_and_an_average_of_the_weights(hk, world):
    """Groups with their own rates and decay, two backwards a step, and weights averaged by a hook on the step."""
    import torch

    def run(sharded: bool) -> list[Any]:
        model = net()
        matrices = [one for one in model.parameters() if one.dim() > 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [model[0].bias], "lr": 0.05}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
        hk.distribute(optimizer, model, shard_state=sharded, backward_passes_per_step=2)
        hk.broadcast_state(model, optimizer)
        for step in range(STEPS):
            if step == 3:  # begins to train later
                optimizer.add_param_group({"params": [model[3].bias, model[5].bias], "lr": 0.02})
            for half in range(2):
                (loss_of(model, world, 2 * step + half) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [weights(model), weights(average)]

    np.testing.assert_allclose(run(True), run(False), rtol=0, atol=1e-12)


@on_ranks("torch", n=2)
def test_a_closure_sparse_gradients_and_channels_last(hk, world):
    import torch

    def run(sharded: bool) -> Any:
        torch.manual_seed(3)
        model = torch.nn.ModuleList(
            [
                torch.nn.Embedding(30, 6, sparse=True),
                torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
                torch.nn.Linear(6, 30),
            ]
        ).double()
        optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, shard_state=sharded)
        hk.broadcast_state(model, optimizer)
        generator = torch.Generator().manual_seed(world.rank)
        for _ in range(STEPS):
            words, image = torch.randint(30, (5,), generator=generator), torch.randn(2, 3, 5, 5, generator=generator)

            def closure(words: Any = words, image: Any = image) -> Any:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model[2](model[0](words)), words)
                loss = loss + model[1](image.double().contiguous(memory_format=torch.channels_last)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        return weights(model)

    np.testing.assert_allclose(run(True), run(False), rtol=0, atol=1e-12)


@on_ranks("torch", n=2)
def test_a_step_that_changes_gradients_and_calls_that_of_its_base(hk, world):
    import torch

    class Centralized(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            for one in (one for group in self.param_groups for one in group["params"]):
                one.grad = one.grad * 0.5 + 0.01 * one.detach()
            return super().step(closure)

    whole, _ = trained(hk, world, lambda model: Centralized(model.parameters(), lr=0.01), sharded=False)
    found, _ = trained(hk, world, lambda model: Centralized(model.parameters(), lr=0.01), sharded=True)
    np.testing.assert_allclose(weights(found), weights(whole), rtol=0, atol=1e-12)


@on_ranks("torch", n=2)
def test_parameters_in_16_bits_have_float32_copies_that_follow_the_program(hk, world):
    """As float32 training whose weights are rounded for each forward."""
    import torch

    model, exact = net(torch.bfloat16), net(torch.bfloat16).float()
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model, shard_state=True)
    hk.broadcast_state(model, optimizer)
    reference = torch.optim.SGD(exact.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, world, step).backward()
        for one, other in zip(exact.parameters(), model.parameters(), strict=True):
            one.grad = other.grad.float()
        optimizer.step()
        reference.step()
        if step == 3:
            with torch.no_grad():
                model[3].weight.mul_(0.5)
                exact[3].weight.copy_(model[3].weight)
    for one, other in zip(exact.parameters(), model.parameters(), strict=True):
        np.testing.assert_array_equal(one.detach().bfloat16().float().numpy(), other.detach().float().numpy())
    assert {one.dtype for state in optimizer.state.values() for one in state.values()} == {torch.float32}


@on_ranks("torch", n=2)
def test_a_grad_scaler_skips_a_step_on_all_ranks(hk, world):
    import torch

    def run(sharded: bool) -> Any:
        model = net(torch.float32)
        optimizer = hk.distribute(torch.optim.Adam(model.parameters(), lr=0.01), model, shard_state=sharded)
        hk.broadcast_state(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, world, step)
            scaler.scale(loss * float("inf") if step == 2 and world.rank == 1 else loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
        return weights(model)

    np.testing.assert_allclose(run(True), run(False), rtol=0, atol=1e-6)


@on_ranks("torch", n=2)
def test_what_cannot_be_divided_is_refused_by_name(hk, world):
    import torch

    from hvdkit.errors import InvalidArgumentError

    class ClipsByAll(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 0.1)
            return super().step(closure)

    class Jitters(torch.optim.SGD):
        """By a factor that each rank would draw for itself."""

        def step(self, closure: Any = None) -> Any:
            factor = float(torch.rand(()))
            for group in self.param_groups:
                group["lr"] = 0.1 * factor
            return super().step(closure)

    class Outer(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def refused(of: Any, *says: str, **options: Any) -> None:
        model = net()
        with pytest.raises(InvalidArgumentError) as error:
            hk.distribute(of(model.parameters()), model, shard_state=True, **options)
        assert all(one in str(error.value) for one in says), error.value

    class LearnsItsRate(torch.optim.SGD):
        """By what it sees of all parameters, and shows it later than in the first steps."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["seen"] = group.get("seen", 0.0) + sum(one.grad.abs().sum().item() for one in group["params"])
            return super().step(closure)

    refused(lambda these: ClipsByAll(these, lr=0.1), "ClipsByAll", "depends on others")
    refused(lambda these: LearnsItsRate(these, lr=0.1), "LearnsItsRate", "depends on others")
    refused(lambda these: Jitters(these, lr=0.1), "Jitters", "depends on others")
    refused(torch.optim.LBFGS, "LBFGS", "closure")
    refused(Outer, "Outer", "another one")
    refused(torch.optim.Adam, "every=4", every=4)
    refused(torch.optim.Adam, "op='adasum'", op="adasum")
    refused(torch.optim.Adam, "process_set", process_set=object())
    model = net()
    with pytest.raises(InvalidArgumentError, match="shard_state must be"):
        hk.distribute(torch.optim.Adam(model.parameters()), model, shard_state="yes")
    optimizer = hk.distribute(torch.optim.Adam(model.parameters()), model, shard_state=True)
    with pytest.raises(InvalidArgumentError, match=r"Checkpoints, or call gather_state"):
        optimizer.state_dict()
    with pytest.raises(InvalidArgumentError, match="a rank that is lost"):
        hk.ElasticState(model, optimizer, loader=None)
    with pytest.raises(InvalidArgumentError, match="every rank takes every step"):
        hk.join(model, optimizer, world)


@on_ranks("torch", n=2)
def test_trying_an_optimizer_draws_no_number_and_counts_no_step(hk, world):
    import torch

    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hk.distribute(optimizer, model, shard_state=True)
    assert torch.equal(before, torch.get_rng_state())
    assert not optimizer.state
    assert all(one.grad is None for one in model.parameters())


@on_ranks("torch", n=2)
def test_another_order_in_memory_is_refused(hk, world):
    import torch

    from hvdkit.errors import InvalidArgumentError

    model = torch.nn.Conv2d(3, 5, 3)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, shard_state=True)
    model.to(memory_format=torch.channels_last)
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    with pytest.raises(InvalidArgumentError, match="another order in memory"):
        optimizer.step()


@on_ranks("torch", n=2)
def test_an_error_in_a_step_leaves_the_optimizer_whole(hk, world):
    import torch

    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("no memory")
            return super().step(closure)

    model = net()
    optimizer = hk.distribute(Fails(model.parameters(), lr=0.1), model, shard_state=True)
    loss_of(model, world, 0).backward()
    Fails.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()
    Fails.fails = False
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == list(map(id, model.parameters()))
    optimizer.zero_grad()
    assert all(one.grad is None for one in model.parameters())


# Checkpoints ----------------------------------------------------------------------------------------------------------


def on_from(
    hk: Any, world: Any, directory: Any, steps: tuple[int, int], name: str, sharded: bool, how: str = ""
) -> Any:
    """Train on from what is in the directory; what the weights become, and how many numbers a rank keeps."""
    import torch

    model = net(torch.bfloat16 if how == "bfloat16" else None)
    plain = torch.optim.SGD(model.parameters(), lr=0.001)  # without momentum it has no state but the copies
    optimizer = plain if how == "bfloat16" else made(name, model.parameters())
    hk.distribute(optimizer, model, shard_state=sharded)
    hk.broadcast_state(model, optimizer)
    checkpoints = hk.Checkpoints(directory, asynchronous=how == "asynchronous")
    checkpoints.restore(model, optimizer)
    for step in range(*steps):
        optimizer.zero_grad()
        loss_of(model, world, step).backward()
        optimizer.step()
        checkpoints.save(model, optimizer, step=step + 1)
    checkpoints.wait()
    hk.check_agreement(model, optimizer, world)
    return weights(model), numbers_kept(optimizer)


@pytest.mark.parallel
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_it_goes_on_on_any_number_of_ranks_divided_or_not(run_job, tmp_path, name):
    whole = run_job("torch", on_from, 1, directory=tmp_path / "whole", steps=(0, 10), name=name, sharded=False)
    directory = tmp_path / "moving"
    for start, (n, sharded) in enumerate([(2, True), (3, True), (1, True), (2, False), (3, True)]):
        steps = (2 * start, 2 * start + 2)
        found = run_job("torch", on_from, n, directory=directory, steps=steps, name=name, sharded=sharded)
    for values, _ in found:
        np.testing.assert_allclose(values, whole[0][0], rtol=0, atol=1e-12)
    newest = max(directory.iterdir())
    assert {one.name for one in newest.glob("optimizer*")} == {
        "optimizer.pt",
        *(f"optimizer-{rank}-of-3.pt" for rank in range(3)),
    }


@on_ranks("torch", n=2)
def test_a_resumed_training_is_the_same_bits(hk, world, tmp_path):
    for how in ("", "asynchronous", "bfloat16"):
        whole, _ = on_from(hk, world, tmp_path / f"whole{how}", (0, 6), "AdamW", True, how)
        on_from(hk, world, tmp_path / f"parts{how}", (0, 3), "AdamW", True, how)
        found, _ = on_from(hk, world, tmp_path / f"parts{how}", (3, 6), "AdamW", True, how)
        np.testing.assert_array_equal(found, whole)
        assert all(one.name.startswith("step-") or one.is_file() for one in (tmp_path / f"parts{how}").iterdir())


@on_ranks("torch", n=2)
def test_the_whole_state_is_gathered_and_loaded(hk, world, everyone):
    import torch

    _, optimizer = trained(hk, world, lambda model: made("AdamW", model.parameters()), sharded=True)
    plain, undivided = trained(hk, world, lambda model: made("AdamW", model.parameters()), sharded=False)
    gathered = hk.gather_state(optimizer)
    assert everyone(gathered is not None) == [True, False]
    if gathered is not None:
        wanted = undivided.state_dict()
        assert gathered["param_groups"] == wanted["param_groups"]
        for place, state in wanted["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(gathered["state"][place][key], value, rtol=0, atol=1e-12)
        torch.optim.AdamW(net().parameters(), lr=0.1).load_state_dict(gathered)
    assert hk.gather_state(undivided) is not None or world.rank == 1
    again = net()
    again.load_state_dict(plain.state_dict())
    loaded = hk.distribute(made("AdamW", again.parameters()), again, shard_state=True)
    loaded.load_state_dict(copy.deepcopy(undivided.state_dict()))  # the same file on every rank
    assert numbers_kept(loaded) == pytest.approx(numbers_kept(undivided) / 2, rel=0.05)
    for one, stepping in ((plain, undivided), (again, loaded)):
        stepping.zero_grad()
        loss_of(one, world, 9).backward()
        stepping.step()
    np.testing.assert_allclose(weights(again), weights(plain), rtol=0, atol=1e-12)


@on_ranks("torch", n=2)
def test_a_checkpoint_that_does_not_fit_changes_nothing(hk, world, everyone, tmp_path):
    import torch

    from hvdkit.errors import CheckpointError

    on_from(hk, world, tmp_path, (0, 2), "AdamW", True)
    (tmp_path / "step-0000000001").rename(tmp_path / "step-0000000009") if world.is_root else None
    everyone("renamed")
    (newest,) = tmp_path.glob("step-0000000009")
    other = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Linear(7, 2)).double()
    optimizer = hk.distribute(made("AdamW", other.parameters()), other, shard_state=True)
    hk.broadcast_state(other, optimizer)
    before = weights(other)
    with pytest.raises(CheckpointError):
        hk.Checkpoints(tmp_path).restore(other, optimizer)
    np.testing.assert_array_equal(weights(other), before)
    assert not optimizer.state
    if world.is_root:
        (newest / "optimizer-1-of-2.pt").unlink()
    everyone("removed")
    model = net()
    optimizer = hk.distribute(made("AdamW", model.parameters()), model, shard_state=True)
    saved = hk.Checkpoints(tmp_path).restore(model, optimizer)
    assert saved is not None and saved.step == 2 and "optimizer-1-of-2.pt" in " ".join(saved.skipped)


@on_ranks("torch", n=2)
def test_a_directory_that_not_all_ranks_see_is_named(hk, world, everyone, tmp_path, monkeypatch):
    from hvdkit.errors import CheckpointError
    from hvdkit.steps import shard_state

    class Unseen(type(tmp_path)):  # type: ignore[misc]
        def is_dir(self) -> bool:
            return False

    model = net()
    optimizer = hk.distribute(made("AdamW", model.parameters()), model, shard_state=True)
    checkpoints = hk.Checkpoints(tmp_path)
    checkpoints.save(model, optimizer, step=1)
    if world.rank == 1:
        monkeypatch.setattr(shard_state, "Path", Unseen)
    with pytest.raises(CheckpointError, match=r"rank 1 cannot see .*every rank writes the state"):
        checkpoints.save(model, optimizer, step=2)
    with pytest.raises(CheckpointError, match=r"rank 1 cannot see .*every rank reads the state"):
        checkpoints.restore(model, optimizer)
    monkeypatch.undo()
    everyone("again")
    checkpoints.save(model, optimizer, step=3)
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_dir()) == ["step-0000000001", "step-0000000003"]


def dies(hk: Any, world: Any, when: str, directory: Any) -> None:
    """Rank 1 dies after the gradients' exchange, or while it writes what it keeps."""
    from hvdkit.errors import HvdkitError
    from hvdkit.torch import checkpoint

    model = net()
    optimizer = hk.distribute(made("AdamW", model.parameters()), model, shard_state=True)
    hk.broadcast_state(model, optimizer)
    checkpoints = hk.Checkpoints(directory)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, world, step).backward()
        if step == 2 and world.rank == 1 and when == "step":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if step == 2 and world.rank == 1:
            checkpoint._write_readable = lambda file, _: (
                file.write_bytes(b"half"),
                os.kill(os.getpid(), signal.SIGKILL),
            )
        checkpoints.save(model, optimizer, step=step + 1)
    raise HvdkitError("the job went on")


@pytest.mark.parallel
@pytest.mark.parametrize("when", ["step", "save"])
@pytest.mark.parametrize("mpi", [True, False], ids=["mpi", "gloo"])
def test_a_rank_that_dies_is_an_error_and_loses_no_checkpoint(run_job, tmp_path, when, mpi):
    told = run_job("torch", dies, 2, mpi=mpi, fails=True, directory=tmp_path / "saved", when=when)
    assert "rank 1" in told and "the job went on" not in told
    whole = run_job("torch", on_from, directory=tmp_path / "whole", steps=(0, 4), name="AdamW", sharded=True)
    found = run_job("torch", on_from, directory=tmp_path / "saved", steps=(2, 4), name="AdamW", sharded=True)
    np.testing.assert_array_equal(found[0][0], whole[0][0])
    assert all(one.name.startswith("step-") or one.is_file() for one in (tmp_path / "saved").iterdir())
