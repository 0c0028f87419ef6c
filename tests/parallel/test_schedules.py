"""docs/schedules.md: its blocks give the learning rates that it says, with the eight steps around them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from pages import blocks, run
from ranks import on_ranks

import hvdkit

STEPS, EPOCHS, FULL = 3, 30, 0.4  # FULL: the scaled rate on 4 ranks
BLOCKS = blocks("schedules.md")
(AFTER,), (THEN,) = BLOCKS["Warmup with a decay of its own"], BLOCKS["Warmup, then any scheduler"]
(PLATEAU,), (ONE_CYCLE,) = BLOCKS["ReduceLROnPlateau"], BLOCKS["OneCycleLR"]
WRAP = "optimizer = hk.distribute(optimizer, model)\nhk.broadcast_state(model, optimizer)"
SAVE, RESTORE = BLOCKS["Going on where a training stopped"]


def names_of_the_page(hk: Any, world: Any, **more: Any) -> dict[str, Any]:
    import torch
    from torch.optim import lr_scheduler

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return {
        "hk": hk,
        "math": math,
        **{name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__},
        "world": world,
        "steps": STEPS,
        "epochs": EPOCHS,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=hk.scale_lr(0.1, world), momentum=0.9),
        "loss_of": torch.nn.MSELoss(),
        "loader": [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(STEPS)],
        **more,
    }


def rate(names: dict[str, Any]) -> float:
    return float(names["optimizer"].param_groups[0]["lr"])


def rates(names: dict[str, Any], number: int) -> list[float]:
    """The learning rates of the next steps; each a step of the training and of ``schedule``."""
    found = []
    for _ in range(number):
        found.append(rate(names))
        x, y = names["loader"][0]
        names["optimizer"].zero_grad()
        names["loss_of"](names["model"](x), y).backward()
        names["optimizer"].step()
        names["schedule"].step()
    return found


def warm_cosine(step: int) -> float:
    """From 0.1 to FULL in 5 epochs, then half a cosine in 25."""
    if step < 5 * STEPS:
        return 0.1 + (FULL - 0.1) * step / (5 * STEPS)
    return FULL * 0.5 * (1 + math.cos(math.pi * (step - 5 * STEPS) / (25 * STEPS)))


@pytest.mark.parametrize("distributed", ["before", "after"])
@on_ranks("torch", n=1)
def test_sequential_lr_of_the_warmup_and_a_cosine(hk, world, distributed):
    names = names_of_the_page(hk, hvdkit.Topology(world.rank, 4))
    run(f"{WRAP}\n{THEN}" if distributed == "before" else f"{THEN}\n{WRAP}", names)
    assert rates(names, 30 * STEPS) == pytest.approx([warm_cosine(step) for step in range(30 * STEPS)], abs=1e-12)


@on_ranks("torch", n=1)
def test_a_decay_after_the_warmup_is_the_same(hk, world, tmp_path):
    names = names_of_the_page(hk, hvdkit.Topology(world.rank, 4), checkpoints=hk.Checkpoints(tmp_path), step=STEPS)
    run(AFTER, names)
    assert rate(names) == pytest.approx(warm_cosine(STEPS))
    found = rates(names, 29 * STEPS)
    assert found == pytest.approx([warm_cosine(step) for step in range(STEPS, 30 * STEPS)], abs=1e-12)
    run(SAVE.replace("loader=loader, ", ""), names)
    again = names_of_the_page(hk, hvdkit.Topology(world.rank, 4), checkpoints=hk.Checkpoints(tmp_path))
    run(AFTER, again)
    run(RESTORE.replace(", loader=loader", ""), again)
    assert again["schedule"].last_epoch == 30 * STEPS
    assert rates(again, 1) == rates(names, 1) == pytest.approx([warm_cosine(30 * STEPS)], abs=1e-12)


@on_ranks("torch", n=1)
def test_a_chained_scheduler_keeps_the_rate_of_the_warmup_alone(hk):
    names = names_of_the_page(hk, hvdkit.Topology(0, 4))
    run(
        "warmup = hk.warmup(optimizer, world, steps, epochs=1)\n"
        "schedule = ChainedScheduler([ExponentialLR(optimizer, 0.5), warmup])",
        names,
    )
    assert rates(names, 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


@on_ranks("torch", n=1)
def test_one_cycle_goes_up_to_the_scaled_rate(hk):
    names = names_of_the_page(hk, hvdkit.Topology(0, 4))
    run(ONE_CYCLE, names)
    found = rates(names, EPOCHS * STEPS - 1)
    assert max(found) == pytest.approx(FULL) and found[0] < FULL / 20 and found[-1] < FULL / 1000


@on_ranks("torch", n=2)
def test_schedules_made_before_distribute_and_broadcast_go_on_alike_on_all_ranks(hk, world, everyone):
    import torch

    names = names_of_the_page(hk, world)
    for group in names["optimizer"].param_groups:
        group["weight_decay"] = 0.1 * world.rank  # what broadcast_state makes the root's
    run(f"{THEN}\n{WRAP}", names)
    found = rates(names, 8 * STEPS)
    assert everyone(found) == [found] * 2 and len(set(found)) > 20
    assert isinstance(names["schedule"].optimizer, torch.optim.SGD)
    assert names["schedule"].optimizer is names["optimizer"]
    hk.check_agreement(names["model"], names["optimizer"], world)


@on_ranks("torch", n=2)
def test_a_plateau_of_the_mean_lowers_the_rate_on_all_ranks_in_the_same_epoch(hk, world, everyone):
    names = names_of_the_page(hk, world, epochs=14)
    flat = [10.0, 10.0, 8.0, *[8.0] * 11]  # the mean stalls from the third epoch on
    own = [value + (3 - epoch / 2 if world.rank else epoch / 2 - 3) for epoch, value in enumerate(flat)]
    turns = iter([value for value in own for _ in range(STEPS)])
    names["loss_of"] = lambda output, y: next(turns) + 0 * output.sum()
    names["hk"].distribute(names["optimizer"], names["model"])
    run(PLATEAU, names)
    # Eleven bad epochs after the first one that it sees: lowered after each four of them.
    assert rate(names) == pytest.approx(0.2 * 0.1**2)
    assert everyone(rate(names)) == [rate(names)] * 2
    names["warmup"].step()
    assert rate(names) == pytest.approx(0.2)  # why the page stops calling it


@pytest.mark.parametrize("block", [THEN, ONE_CYCLE], ids=["SequentialLR", "OneCycleLR"])
@on_ranks("torch", n=2)
def test_a_schedule_goes_on_by_its_state(hk, world, tmp_path, block):
    import torch

    def made() -> dict[str, Any]:
        data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
        names = names_of_the_page(hk, world, checkpoints=hk.Checkpoints(tmp_path))
        run(f"{block}\n{WRAP}", names)
        return {**names, "loader": hk.shard(data, world, 2), "data": data}

    def train(names: dict[str, Any], number: int) -> list[Any]:
        x, y = names["data"][:2]
        return [*rates({**names, "loader": [(x, y)]}, number), names["model"].weight.tolist()]

    def seeded(then: Callable[[], Any]) -> Any:
        torch.manual_seed(1)
        return then()

    whole, part = seeded(made), seeded(made)
    expected = train(whole, 40)
    train(part, 20)
    run(SAVE, {**part, "step": 20})
    rest = seeded(made)
    run(RESTORE, rest)
    assert train(rest, 20) == expected[20:]
    for attempt in (
        lambda: rest["checkpoints"].restore(
            rest["model"], rest["optimizer"], loader=rest["loader"], schedule=rest["schedule"]
        ),
        lambda: hk.ElasticState(rest["model"], rest["optimizer"], loader=rest["loader"], schedule=rest["schedule"]),
    ):
        with pytest.raises(hvdkit.InvalidArgumentError, match="schedule must be from warmup"):
            attempt()
