"""hvdkit.torch on real ranks. Frameworks are imported within, where the ranks are."""

import math
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ranks import missing, on_ranks

import hvdkit

SAMPLES, FEATURES = 53, 6  # 53 is no multiple of any n * batch


def make_data() -> Any:
    import torch

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long())


def make_model(seed: int = 0) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def weights(model: Any) -> list[float]:
    import torch

    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def sgd(model: Any, rate: float = 0.1) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=rate)


def topology() -> dict[str, Any]:
    import hvdkit.torch as hk

    world = hk.init()
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "launcher")
    return {name: getattr(world, name) for name in names}


@pytest.mark.parametrize(("controller", "launcher"), [("mpi", "Open MPI"), ("gloo", "horovodrun")])
@pytest.mark.parallel
@pytest.mark.skipif(bool(missing("torch")), reason="needs torch and horovod (`make test` installs all)")
def test_topology_under_each_launcher(run_ranks, controller, launcher):
    one_host = {"size": 3, "local_size": 3, "cross_rank": 0, "cross_size": 1, "launcher": launcher}
    for rank, world in enumerate(run_ranks(topology, 3, controller=controller, warm="torch")):
        assert world == {"rank": rank, "local_rank": rank, **one_host}


@on_ranks("torch", n=1, fresh=True)
def test_a_launcher_that_horovod_does_not_see_is_refused(hk):
    os.environ.update({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"})
    with pytest.raises(hvdkit.TopologyMismatchError) as refused:
        hk.init()
    for part in ("srun started rank 2 of 4", "rank 0 of 1", "Open MPI", "hvdkit launch"):
        assert part in str(refused.value)


@on_ranks("torch", n=1)
def test_a_rank_that_joins_adds_zeros_where_the_model_is(hk):
    """Where the others reduce on GPUs, zeros on the CPU would go over another library, and all would wait."""
    import torch

    on_gpu = torch.nn.Linear(1, 1)
    on_gpu.parameters = lambda: iter([SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))])
    world = SimpleNamespace(size=2)
    with mock.patch.object(hk, "broadcast_state"), mock.patch.object(hk.hvd, "join", return_value=1) as join:
        assert [hk.join(model, None, world) for model in (on_gpu, torch.nn.Linear(1, 1))] == [1, 1]
    assert [call.args for call in join.call_args_list] == [(1,), (-1,)]


@on_ranks("torch", n=3)
def test_broadcast_copies_everything_bit_for_bit(hk, world, everyone):
    """The root has an optimizer with slots, the others have none; Adam counts its steps in a 0-dimensional tensor."""
    import torch

    model = make_model(seed=world.rank)
    model.register_buffer("odd", torch.arange(3, dtype=torch.bfloat16) + world.rank)
    model.register_buffer("transposed", (torch.arange(6.0).reshape(2, 3) * (world.rank + 1)).T)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (world.rank + 1))
    if world.is_root:
        model(torch.ones(2, FEATURES, dtype=torch.float64)).sum().backward()
        optimizer.step()
    optimizer = hk.distribute(optimizer, model)
    hk.broadcast_state(model, optimizer)
    hk.check_agreement(model, optimizer, world)
    slots = next(iter(optimizer.state.values()))
    found = {
        "weights": weights(model),
        "odd": model.odd.float().tolist(),
        "transposed": model.transposed.tolist(),
        "lr": optimizer.param_groups[0]["lr"],
        "step": float(slots["step"]),
        "exp_avg": slots["exp_avg"].reshape(-1).tolist(),
    }
    assert everyone(found) == [found] * 3
    assert found["step"] == 1.0 and found["odd"] == [0.0, 1.0, 2.0] and found["lr"] == 0.01


@on_ranks("torch", n=2)
def test_broadcast_takes_no_step_of_its_own(hk, world):
    """Horovod's own broadcast_optimizer_state steps with zero gradients, which decays the weights."""
    import torch

    model = make_model()
    before = weights(model)
    optimizer = hk.distribute(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model)
    hk.broadcast_state(model, optimizer)
    assert weights(model) == before and len(optimizer.state) == 0


@on_ranks("torch", n=3)
def test_metrics_are_means_over_ranks_and_over_counts(hk, world):
    means = hk.average_metrics({"loss": float(world.rank), "accuracy": (world.rank * 10, 10 + 10 * world.rank)}, world)
    assert means == pytest.approx({"loss": 1.0, "accuracy": 30 / 60})
    with pytest.raises(hvdkit.AgreementError, match="different metrics"):
        hk.average_metrics({f"loss{world.rank}": 1.0}, world)


@on_ranks("torch", n=2)
def test_a_validation_may_run_in_inference_mode(hk, world, everyone, tmp_path):
    """Horovod cannot write to the tensors that are made there."""
    import torch

    class Own(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(torch.arange(3 + world.rank))

    model = make_model()
    loss_of = hk.weighted_loss(torch.nn.functional.cross_entropy, over="targets")
    with torch.inference_mode():
        assert hk.average_metrics({"loss": float(world.rank)}, world) == {"loss": 0.5}
        hk.check_agreement(model, None, world)
        assert len(list(hk.shard(Own(), world, 1, remainder="exact"))) == 4
        assert everyone(loss_of(torch.zeros(1, 2), torch.tensor([0])).item()) == pytest.approx([math.log(2)] * 2)
        hk.Checkpoints(tmp_path).save(model, None, step=1)
    hk.Checkpoints(tmp_path).restore(model, None)


def update(hk: Any, world: Any, **options: Any) -> list[float]:
    """The gradient that the optimizer applies after rank-dependent backward passes."""
    import torch

    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hk.distribute(sgd(model, 1.0), model, **options)
    for number in range(options.get("backward_passes_per_step", 1)):
        model(torch.tensor([[1.0 + world.rank, 10.0 * (number + 1)]])).sum().backward()
    optimizer.step()
    return (-model.weight.detach()).reshape(-1).tolist()


@on_ranks("torch", n=2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.5, 10.0]),
        ({"op": "sum"}, [3.0, 20.0]),
        ({"compression": "fp16"}, [1.5, 10.0]),
        ({"gradient_predivide_factor": 2.0}, [1.5, 10.0]),
        ({"groups": 1}, [1.5, 10.0]),
        ({"backward_passes_per_step": 2}, [3.0, 30.0]),
    ],
)
def test_gradient_options_reach_horovod(hk, world, options, expected):
    assert update(hk, world, **options) == pytest.approx(expected)


@on_ranks("torch", n=2, mpi=True)
def test_adasum_lies_between_mean_and_sum_of_nearly_parallel_gradients(hk, world, everyone):
    found = update(hk, world, op="adasum")
    assert everyone(found) == [found] * 2
    assert 10.0 <= found[1] < 20.0


@on_ranks("torch", n=3, fresh=True)
def test_process_set_averages_within_the_set(hk, everyone):
    """Ranks 0 and 1 average among themselves; rank 2 is alone."""
    import horovod.torch as hvd
    import torch

    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    world = hk.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hk.distribute(sgd(model, 1.0), model, process_set=pair)
    model(torch.tensor([[2.0 + 2.0 * world.rank]])).sum().backward()
    optimizer.step()
    # Rank 2 has nothing to wait for, and its end would end the others' process set.
    assert everyone(-model.weight.item()) == pytest.approx([3.0, 3.0, 6.0])


@on_ranks("torch", n=1)
def test_mistakes_are_single_errors(hk, world):
    from torch import nn

    model = make_model()
    once = hk.distribute(sgd(model), model)
    for attempt, part in (
        (lambda: hk.distribute(once, model), "distributed already"),
        (lambda: hk.distribute(sgd(model), make_model()), "4 parameters, 0 of them in the model"),
        (lambda: hk.broadcast_state(nn.LazyLinear(3)), "not built yet"),
        (lambda: hk.broadcast_state(model, root=9), "root must be a rank"),
    ):
        with pytest.raises(hvdkit.InvalidArgumentError, match=part):
            attempt()


def fit(hk: Any, batch_size: int, base_lr: float, epochs: int = 4, **options: Any) -> dict[str, Any]:
    import torch

    model = make_model()
    settings = {"epochs": epochs, "batch_size": batch_size, "base_lr": base_lr, **options}
    history = hk.fit(model, torch.optim.SGD, torch.nn.CrossEntropyLoss(), make_data(), **settings)
    return {"history": history, "weights": weights(model)}


@on_ranks("torch", n=2)
def test_fit_goes_on_where_it_was_interrupted(hk, world, tmp_path):
    settings = {"batch_size": 4, "base_lr": 0.1, "warmup_epochs": 3}
    whole = fit(hk, checkpoint_dir=tmp_path / "whole", **settings)
    fit(hk, epochs=2, checkpoint_dir=tmp_path / "run", **settings)
    rest = fit(hk, checkpoint_dir=tmp_path / "run", **settings)
    assert rest == {"history": whole["history"][2:], "weights": whole["weights"]}


@on_ranks("torch", n=2)
def test_fit_on_every_sample_is_that_of_one_process(hk, world, alone):
    expected = alone(fit, batch_size=8, base_lr=0.2, remainder="exact")
    found = fit(hk, batch_size=4, base_lr=0.1, remainder="exact")
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@on_ranks("torch", n=2)
def test_fit_in_mixed_precision_learns_what_it_learns_without(hk, world, precision):
    import torch

    def one(precision):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        x, y = make_data().tensors
        data = torch.utils.data.TensorDataset(x.float(), y)
        settings = {"epochs": 4, "batch_size": 4, "base_lr": 0.1, "kind": "cpu", "precision": precision}
        history = hk.fit(model, torch.optim.SGD, torch.nn.CrossEntropyLoss(), data, **settings)
        hk.check_agreement(model, None, world)
        return [epoch["loss"] for epoch in history], next(model.parameters()).dtype

    (losses, kind), (exact, _) = one(precision), one("fp32")
    assert kind == torch.float32 and losses != exact and losses == pytest.approx(exact, rel=0.02)
    with pytest.raises(hvdkit.InvalidArgumentError, match="precision must be one of fp32, bf16, fp16, got 'fp8'"):
        one("fp8")
