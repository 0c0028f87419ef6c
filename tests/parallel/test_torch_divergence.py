"""PyTorch programs whose ranks train apart end with one error on every rank; those that only seem to, go on."""

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
from ranks import on_ranks

import hvdkit

STEPS = 5


def batch(world: Any, step: int) -> tuple[Any, Any]:
    """This rank's part of a step's batch."""
    import torch

    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)[world.rank :: world.size]
    return x, x.sum(dim=1, keepdim=True).sin()


def net(seed: int = 0) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def begin(hk: Any, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    import torch

    model = net(seed)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, **options)
    return model, optimizer


def without_broadcast(hk: Any, world: Any, **options: Any) -> None:
    model, optimizer = begin(hk, seed=world.rank, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(world, step)).backward()
        optimizer.step()


def without_broadcast_in_half_precision(hk: Any, world: Any) -> None:
    without_broadcast(hk, world, compression="fp16")


def noise(hk: Any, world: Any) -> None:
    import torch

    model, optimizer = begin(hk)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(world, step)).backward()
        for one in model.parameters():
            one.grad += 0.01 * torch.randn(one.shape, generator=generator, dtype=one.dtype)
        optimizer.step()


def noise_on_weights_that_are_clipped(hk: Any, world: Any) -> None:
    """Their numbers are in other memory after each step."""
    import torch

    model, optimizer = begin(hk)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(world, step)).backward()
        optimizer.step()
        for one in model.parameters():
            noise = 0.01 * torch.randn(one.shape, generator=generator, dtype=one.dtype)
            one.data = (one.data + noise).clamp(-1, 1)


def noise_on_layers_that_train_by_turns(hk: Any, world: Any) -> None:
    import torch

    model, optimizer = begin(hk)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(STEPS):
        for number in (0, 2):
            model[number].requires_grad_(step % 2 == number // 2)
        optimizer.zero_grad()
        loss_of(model, *batch(world, step)).backward()
        for one in model.parameters():
            if one.grad is not None:
                one.grad += 0.01 * torch.randn(one.shape, generator=generator, dtype=one.dtype)
        optimizer.step()


def a_second_gradient_added_to_the_mean(hk: Any, world: Any) -> None:
    import torch

    model, optimizer = begin(hk)
    parameters = list(model.parameters())
    for step in range(STEPS):
        x, y = batch(world, step)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        for one, gradient in zip(parameters, torch.autograd.grad((model(x) ** 2).mean(), parameters), strict=True):
            one.grad += gradient
        optimizer.step()


def a_schedule_that_follows_the_ranks_own_loss(hk: Any, world: Any) -> None:
    import torch

    model, optimizer = begin(hk)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(world, step)).backward()
        optimizer.step()
        schedule.step(-step * world.rank)


def a_table_that_forward_changes(hk: Any, world: Any) -> None:
    import torch

    torch.manual_seed(0)
    table = torch.nn.Embedding(6, 5, max_norm=0.5).double()
    optimizer = hk.distribute(torch.optim.SGD(table.parameters(), lr=0.05), table)
    for _ in range(STEPS):
        optimizer.zero_grad()
        table(torch.tensor([world.rank, 5])).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "program",
    [
        without_broadcast,
        without_broadcast_in_half_precision,
        noise,
        noise_on_weights_that_are_clipped,
        noise_on_layers_that_train_by_turns,
        a_second_gradient_added_to_the_mean,
        a_schedule_that_follows_the_ranks_own_loss,
        a_table_that_forward_changes,
    ],
    ids=lambda one: one.__name__,
)
@on_ranks("torch", n=3)
def test_ranks_that_train_apart_are_one_error_on_every_rank(hk, world, program):
    with pytest.raises(hvdkit.AgreementError, match=r"their values of (\d\.)?weight differ.*broadcast_state"):
        program(hk, world)


@on_ranks("torch", n=3)
def test_a_step_that_one_rank_leaves_out_is_one_error_on_every_rank(hk, world):
    model, optimizer = begin(hk)
    hk.broadcast_state(model, optimizer)
    for step in range(3):
        last = step == 2
        with pytest.raises(hvdkit.AgreementError, match="a step that 1 of 3 ranks left out") if last else nullcontext():
            optimizer.zero_grad()
            loss_of(model, *batch(world, step)).backward()
        if step != 1 or world.rank:
            optimizer.step()


@on_ranks("torch", n=2)
def test_weights_of_ones_own_within_a_step_are_no_divergence(hk, world):
    """Each rank computes at other weights, and puts them back before the step (sampled weights, sharpness)."""
    import torch

    model, optimizer = begin(hk)
    hk.broadcast_state(model, optimizer)
    for step in range(STEPS):
        kept = [one.detach().clone() for one in model.parameters()]
        with torch.no_grad():
            for one in model.parameters():
                one += 0.1 * (world.rank + 1)
        optimizer.zero_grad()
        loss_of(model, *batch(world, step)).backward()
        with torch.no_grad():
            for one, value in zip(model.parameters(), kept, strict=True):
                one.copy_(value)
        optimizer.step()
    hk.check_agreement(model, optimizer, world)


@on_ranks("torch", n=3)
def test_a_rank_that_has_joined_is_not_counted(hk, world):
    model, optimizer = begin(hk)
    hk.broadcast_state(model, optimizer)
    for _ in range(3):  # a rank that had joined has exchanged less often
        for step in range(1 if world.rank == 1 else STEPS):
            optimizer.zero_grad()
            loss_of(model, *batch(world, step)).backward()
            optimizer.step()
        hk.join(model, optimizer, world)
    hk.check_agreement(model, optimizer, world)


@on_ranks("torch", n=2)
def test_the_rounding_of_a_type_is_no_divergence(hk, world):
    import torch

    for kind in (torch.float64, torch.float32, torch.bfloat16):
        model, optimizer = begin(hk)
        model.to(kind)
        with torch.no_grad():
            for one in model.parameters():
                one *= 1 + world.rank * torch.finfo(kind).eps
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, *(one.to(kind) for one in batch(world, step))).backward()
            optimizer.step()


def a_rival(hk: Any, world: Any, distributes: bool) -> None:
    """Two models that train by turns, each with an optimizer."""
    model, optimizer = begin(hk)
    rival = net(1)
    second = momentum(rival)
    if distributes:
        hk.distribute(second, rival)
    for step in range(STEPS):
        for one, its in ((model, optimizer), (rival, second)):
            its.zero_grad()
            loss_of(one, *batch(world, step)).backward()
            its.step()


def a_new_head(hk: Any, world: Any, distributes: bool) -> None:
    """The second stage begins with a new last layer and a new optimizer."""
    from torch import nn

    model, _ = begin(hk)
    model[2] = nn.Linear(5, 1).double()
    second = momentum(model)
    if distributes:
        hk.distribute(second, model)
    hk.broadcast_state(model, second)
    for step in range(STEPS):
        second.zero_grad()
        loss_of(model, *batch(world, step)).backward()
        second.step()


def a_second_stage(hk: Any, world: Any, distributes: bool) -> None:
    """Another model, when the first one has done."""
    model, optimizer = begin(hk)
    loss_of(model, *batch(world, 0)).backward()
    optimizer.step()
    model = net(1)
    optimizer = momentum(model)
    if distributes:
        hk.distribute(optimizer, model)
    for step in range(120):
        optimizer.zero_grad()
        loss_of(model, *batch(world, step)).backward()
        optimizer.step()


def inner_loops(hk: Any, world: Any, distributes: bool) -> None:
    """A copy of the model is trained by this rank alone, and what it has learnt becomes the gradient."""
    model, optimizer = begin(hk)
    for step in range(STEPS):
        learner = copy.deepcopy(model)
        inner = momentum(learner)
        for _ in range(5):
            inner.zero_grad()
            loss_of(learner, *batch(world, step)).backward()
            inner.step()
        optimizer.zero_grad()
        (loss_of(model, *batch(world, step)) + loss_of(learner, *batch(world, step)).detach()).backward()
        optimizer.step()


def masters(hk: Any, world: Any, distributes: bool) -> None:
    """float64 weights beside a model of less precision: the averaged gradients are copied."""
    import torch

    model, carrier = begin(hk)
    weights = [one.detach().double() for one in model.parameters()]
    kept = torch.optim.SGD([one.requires_grad_() for one in weights], lr=0.05)
    for step in range(STEPS):
        carrier.zero_grad()
        loss_of(model, *batch(world, step)).backward()
        for one, trained in zip(weights, model.parameters(), strict=True):
            one.grad = trained.grad.double()
        torch.nn.utils.clip_grad_value_(weights, 0.1)
        kept.step()


def momentum(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("program", "distributes", "told"),
    [
        (a_rival, False, 1),
        (a_rival, True, 0),
        (a_new_head, False, 1),
        (a_new_head, True, 0),
        (a_second_stage, False, 1),
        (a_second_stage, True, 0),
        (inner_loops, True, 0),
        (masters, True, 0),
    ],
)
@on_ranks("torch", n=2)
def test_an_optimizer_that_distribute_has_not_got_is_one_warning(hk, world, program, distributes, told):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        program(hk, world, distributes)
    said = [str(one.message) for one in found if "that distribute has not got" in str(one.message)]
    assert len(said) == told and all("(SGD)" in one for one in said)


@on_ranks("torch")
def test_warnings_name_the_programs_own_line(hk, world):
    import torch

    model, beside = torch.nn.Linear(3, 2), torch.nn.Linear(1, 1)
    x = torch.ones(4, 3)
    plain = torch.optim.SGD(beside.parameters(), 0.1)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 0.1), model)
    hk.broadcast_state(model, optimizer)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            model(x).sum().backward()
            beside(x[:, :1]).sum().backward()
            optimizer.step()
            plain.step()
    assert ["that distribute has not got" in str(one.message) for one in found] == [True]
    assert {one.filename for one in found} == {__file__}
