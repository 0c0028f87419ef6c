"""PyTorch programs whose ranks train apart end with one error on every rank; those that only seem to, go on."""

import copy
import types
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


def warnings_of_steps(world: Any, model: Any, optimizer: Any, text: str) -> list[str]:
    """Those with ``text`` that a training of some steps gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(STEPS):
            train_on(model, optimizer, *batch(world, step))
    return [str(one.message) for one in found if text in str(one.message)]


def net(seed: int = 0) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def train_on(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """The step of an ordinary loop."""
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def begin(hk: Any, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    import torch

    model = net(seed)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, **options)
    return model, optimizer


def without_broadcast(hk: Any, world: Any, **options: Any) -> None:
    model, optimizer = begin(hk, seed=world.rank, **options)
    for step in range(STEPS):
        train_on(model, optimizer, *batch(world, step))


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
        train_on(model, optimizer, *batch(world, step))
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
        train_on(model, optimizer, *batch(world, step))
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
            train_on(model, optimizer, *batch(world, step))
        hk.join(model, optimizer, world)
    hk.check_agreement(model, optimizer, world)


@pytest.mark.parametrize("how", ["assigned", "copied", "added up", "halved", "clipped by norm", "clipped by value"])
@on_ranks("torch", n=2)
def test_clipping_gradients_that_no_backward_made_is_one_warning(hk, world, how):
    """The step averages them, so that only what came before it is this rank's own."""
    import torch

    model, optimizer = begin(hk)
    parameters = list(model.parameters())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(STEPS):
            gradients = torch.autograd.grad(loss_of(model, *batch(world, step)), parameters)
            for one, gradient in zip(parameters, gradients, strict=True):
                one.grad = gradient if how in ("assigned", "clipped by norm") else torch.zeros_like(one)
                if one.grad is not gradient:
                    one.grad.copy_(gradient)
                if how == "added up":
                    one.grad.add_(gradient)
                if how == "halved":
                    one.grad.mul_(0.5)
            if how == "clipped by norm":
                torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            if how == "clipped by value":
                torch.nn.utils.clip_grad_value_(parameters, 0.05)
            optimizer.step()
    said = [str(one.message) for one in found if "came from no backward" in str(one.message)]
    assert len(said) == how.startswith("clipped")
    assert all(("look clipped to 0.1" if "norm" in how else "look clipped to 0.05") in one for one in said)
    hk.check_agreement(model, optimizer, world)


def by_hand(model: Any, parameters: list[Any], loss: Any) -> None:
    """A step of gradient descent without optimizer and backward."""
    import torch

    for one, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        one.data -= 0.1 * gradient


def by_hand_and_back(model: Any, parameters: list[Any], loss: Any) -> None:
    """An inner step at other weights, which are put back, and a backward: what first-order MAML does."""
    kept = [one.detach().clone() for one in parameters]
    by_hand(model, parameters, loss)
    loss_of(model, *batch_of_ones()).backward()
    for one, value in zip(parameters, kept, strict=True):
        one.data.copy_(value)


def slopes(model: Any, parameters: list[Any], loss: Any) -> None:
    """What a second order asks for: several gradients, and nothing moves."""
    import torch

    for _ in range(4):
        torch.autograd.grad(loss, parameters, retain_graph=True)


def batch_of_ones() -> tuple[Any, Any]:
    import torch

    return torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)


@pytest.mark.parametrize(("step_of", "told"), [(by_hand, True), (by_hand_and_back, False), (slopes, False)])
@on_ranks("torch", n=2)
def test_steps_by_hand_from_gradients_that_nobody_averages_are_one_warning(hk, world, step_of, told):
    model, optimizer = begin(hk)
    hk.broadcast_state(model, optimizer)
    parameters = list(model.parameters())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            step_of(model, parameters, loss_of(model, *batch(world, step)))
            if step_of is by_hand_and_back:
                optimizer.step()
    said = [str(one.message) for one in found if "torch.autograd.grad" in str(one.message)]
    assert len(said) == told and all("average them by hvd.allreduce" in one for one in said)


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
            train_on(model, optimizer, *(one.to(kind) for one in batch(world, step)))


def a_rival(hk: Any, world: Any, distributes: bool) -> None:
    """Two models that train by turns, each with an optimizer."""
    model, optimizer = begin(hk)
    rival = net(1)
    second = momentum(rival)
    if distributes:
        hk.distribute(second, rival)
    for step in range(STEPS):
        for one, its in ((model, optimizer), (rival, second)):
            train_on(one, its, *batch(world, step))


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
        train_on(model, second, *batch(world, step))


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
        train_on(model, optimizer, *batch(world, step))


def inner_loops(hk: Any, world: Any, distributes: bool) -> None:
    """A copy of the model is trained by this rank alone, and what it has learnt becomes the gradient."""
    model, optimizer = begin(hk)
    for step in range(STEPS):
        learner = copy.deepcopy(model)
        inner = momentum(learner)
        for _ in range(5):
            train_on(learner, inner, *batch(world, step))
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


def network(hk: Any, world: Any, model: Any) -> Any:
    """A target network, made as the published program does, with this rank's first weights."""
    return copy.deepcopy(model)


def average_of_weights(hk: Any, world: Any, model: Any) -> Any:
    return {name: one.clone() for name, one in model.state_dict().items()}


def held_by_an_agent(hk: Any, world: Any, model: Any) -> Any:
    """Beside more samples than are looked at."""
    agent = types.SimpleNamespace(samples=[{"number": number} for number in range(30_000)])
    agent.networks = {"target": [copy.deepcopy(model)]}
    return agent


def average_that_has_none_yet(hk: Any, world: Any, model: Any) -> Any:
    """As in PyTorch's own example: its first update takes the model's weights."""
    import torch

    return torch.optim.swa_utils.AveragedModel(model)


def broadcast_as_well(hk: Any, world: Any, model: Any) -> Any:
    other = copy.deepcopy(model)
    hk.broadcast_state(other)
    return other


def other_model(hk: Any, world: Any, model: Any) -> Any:
    return net(world.rank + 10)


def what_cannot_be_read(hk: Any, world: Any, model: Any) -> list[Any]:
    """Of as many numbers as the first layer's weight: nested, with its memory freed, of a vmap that has ended."""
    import torch

    numbers = torch.ones(4, 5, 6, dtype=torch.float64)
    nested, freed, ended = torch.nested.nested_tensor([numbers[0, :2], numbers[0, 2:]]), numbers[0].clone(), []
    freed.untyped_storage().resize_(0)
    torch.func.vmap(lambda one: ended.append(one) or one)(numbers)
    return [nested, freed, *ended]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("kept", "reloads", "told"),
    [
        (network, False, True),
        (average_of_weights, False, True),
        (held_by_an_agent, False, True),
        (network, True, False),
        (average_that_has_none_yet, False, False),
        (broadcast_as_well, False, False),
        (other_model, False, False),
        (what_cannot_be_read, False, False),
    ],
)
@on_ranks("torch", n=3)
def test_a_copy_made_before_the_broadcast_is_one_warning(hk, world, kept, reloads, told):
    """The copy has this rank's first weights, the model the root's: a program without a seed."""
    model, optimizer = begin(hk, seed=world.rank)
    other = kept(hk, world, model)
    hk.broadcast_state(model, optimizer)
    if reloads:
        other.load_state_dict(model.state_dict())
    said = warnings_of_steps(world, model, optimizer, "made before broadcast_state")
    assert len(said) == (told and world.rank > 0)
    assert all("the 0.weight that this rank began with" in one for one in said)


@on_ranks("torch", n=2)
def test_a_copy_of_equal_models_is_no_warning(hk, world):
    """Ranks that are seeded alike have equal copies."""
    model, optimizer = begin(hk)
    other = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hk.broadcast_state(model, optimizer)
        loss_of(model, *batch(world, 0)).backward()
    hk.check_agreement(other, None, world)


@on_ranks("torch")
def test_warnings_name_the_programs_own_line(hk, world):
    import torch

    torch.manual_seed(world.rank)
    model, beside = torch.nn.Linear(3, 2), torch.nn.Linear(1, 1)
    x, kept = torch.ones(4, 3), copy.deepcopy(model)
    plain = torch.optim.SGD(beside.parameters(), 0.1)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 0.1), model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hk.broadcast_state(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).sum().backward()
            beside(x[:, :1]).sum().backward()
            optimizer.step()
            plain.step()
        for _ in range(2):
            for one in model.parameters():
                one.grad = torch.ones_like(one).mul_(0.1)
            optimizer.step()
        for _ in range(5):
            gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), gradients, alpha=0.1)
    texts = [str(one.message) for one in found]
    parts = ["that distribute has not got", "came from no backward", "move between gradients"]
    for part in [*parts, *(["made before broadcast_state"] if world.rank and kept is not None else [])]:
        assert any(part in text for text in texts), (part, texts)
    assert {one.filename for one in found} == {__file__}
