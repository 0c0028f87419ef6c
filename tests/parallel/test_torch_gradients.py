"""Ordinary PyTorch programs: n ranks, each on its part of a batch, and one process on all of it end with equal weights.

A program takes ``distribute`` and this process's batches; with ``plain`` it is a program of one process.
"""

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
from ranks import on_ranks

import hvdkit

STEPS, SAMPLES, FEATURES = 5, 12, 6  # samples of a batch of all ranks


def plain(optimizer: Any, model: Any, **options: Any) -> Any:
    return optimizer


def batches(world: Any = None, steps: int = STEPS) -> Any:
    """(x, y) of each step: this rank's part, or with no ``world`` all of it."""
    import torch

    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        y = x.sum(dim=1, keepdim=True).sin()
        share = slice(None) if world is None else slice(world.rank, None, world.size)
        yield x[share], y[share]


def net(seed: int = 0, width: int = 5) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1)).double()


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def train_on(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """The step of an ordinary loop."""
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def adam(model: Any, **options: Any) -> Any:
    import torch

    return torch.optim.Adam(model.parameters(), **{"lr": 0.05, **options})


def momentum(parameters: Any, **options: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, **{"lr": 0.05, "momentum": 0.9, **options})


def clipped_by_value_before_distribute_was_called(distribute, data):
    """A hook of the user's own, and a scheduler that was made before."""
    import torch

    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    optimizer = distribute(optimizer, model)
    for x, y in data:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, x, y).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        schedule.step()
    return [model]


def scaling(distribute, data):
    """Mixed precision as published; one sample makes an infinite gradient in the third step, on one rank."""
    import torch

    model = net()
    optimizer = distribute(momentum(model.parameters(), lr=0.01), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad(set_to_none=True)
        if step == 2:
            x = torch.where(x == first_sample(step), torch.inf, x)
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return [model]


def first_sample(step: int) -> Any:
    return list(batches())[step][0][0]


def closing(optimizer, model, x, y):
    """A closure, as ``step`` takes it."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    return closure


def closures(distribute, data):
    model = net()
    optimizer = distribute(momentum(model.parameters()), model)
    for x, y in data:
        optimizer.step(closing(optimizer, model, x, y))
    return [model]


def lbfgs(distribute, data):
    import torch

    model, options = net(), {"lr": 0.5, "max_iter": 6, "line_search_fn": "strong_wolfe"}
    optimizer = distribute(torch.optim.LBFGS(model.parameters(), **options), model)
    for x, y in data:
        optimizer.step(closing(optimizer, model, x, y))
    return [model]


def a_closure_beside_another_argument(distribute, data):
    """By its name: the ranks' line searches stop at the same loss."""
    import torch

    class Damped(torch.optim.LBFGS):
        def step(self, factor, closure):
            self.param_groups[0]["lr"] = factor
            return super().step(closure)

    model, options = net(), {"max_iter": 6, "line_search_fn": "strong_wolfe"}
    optimizer = distribute(Damped(model.parameters(), **options), model)
    for x, y in data:
        optimizer.step(0.5, closure=closing(optimizer, model, x, y))
    return [model]


def two_models_in_one_backward(distribute, data):
    one, other = net(0), net(1)
    optimizers = [distribute(adam(model), model) for model in (one, other)]
    for x, y in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss_of(one, x, y) + loss_of(other, x, one(x))).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [one, other]


def an_optimizer_of_some_parameters_of_another(distribute, data):
    """The second one's are averaged once, and both step on them."""
    model = net()
    whole = distribute(momentum(model.parameters(), lr=0.02), model)
    head = distribute(momentum(model[2].parameters(), lr=0.02), model)
    for x, y in data:
        train_on(model, whole, x, y)
        head.step()
    return [model]


def replacing_a_layer(distribute, data):
    """The new layer's tensors may lie where the old ones lay."""
    import torch

    model = net()
    optimizer = distribute(momentum(model.parameters(), lr=0.02), model)
    for step, (x, y) in enumerate(data):
        if step == 2:
            optimizer.zero_grad()
            optimizer.state.clear()
            optimizer.param_groups[0]["params"] = []
            model[2] = torch.nn.Identity()
            torch.manual_seed(1)
            model[2] = torch.nn.Linear(5, 1).double()
            optimizer.param_groups[0]["params"] = list(model.parameters())
        train_on(model, optimizer, x, y)
    return [model]


def two_optimizers_on_one_model(distribute, data):
    import torch

    model = net()
    first = distribute(momentum(model[0].parameters()), model)
    second = distribute(torch.optim.AdamW(model[2].parameters(), lr=0.03), model)
    for x, y in data:
        model.zero_grad()
        loss_of(model, x, y).backward()
        first.step()
        second.step()
    return [model]


def unfreezing(distribute, data):
    """First the head alone, then the head is frozen and the body trains: no parameter of before fires a hook."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = distribute(momentum(model.parameters(), weight_decay=0.1), model)
    for step, (x, y) in enumerate(data):
        if step == 2:
            model[0].requires_grad_(True)
            model[2].requires_grad_(False)
        if step == 4:
            model[2].requires_grad_(True)
        train_on(model, optimizer, x, y)
    return [model]


def adding_a_group(distribute, data):
    import torch

    model = net()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = distribute(momentum(model[2].parameters()), model)
    for step, (x, y) in enumerate(data):
        if step == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [model]


def layers_that_no_step_uses(distribute, data):
    """Weight decay and momentum act on zeros, and not where there is no gradient."""
    import torch

    torch.manual_seed(0)
    branches = torch.nn.ModuleList([net(seed) for seed in range(3)])
    optimizer = distribute(momentum(branches.parameters(), weight_decay=0.3), branches)
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss_of(branches[step % 2], x, y).backward()
        optimizer.step()
    assert branches[2][0].weight.grad is None
    return [branches]


def layers_that_some_ranks_use(distribute, data):
    import torch

    torch.manual_seed(0)
    experts = torch.nn.ModuleList([net(seed) for seed in range(3)])
    optimizer = distribute(momentum(experts.parameters(), weight_decay=0.3), experts)
    for x, y in data:
        optimizer.zero_grad()
        taken = (x[:, 0] > x[:, 1] + 1.0).long()
        out = torch.zeros_like(y)
        for number in taken.unique().tolist():
            out[taken == number] = experts[number](x[taken == number])
        ((out - y) ** 2).mean().backward()
        optimizer.step()
    return [experts]


def accumulating(distribute, data):
    model = net()
    optimizer = distribute(adam(model), model)
    for x, y in data:
        optimizer.zero_grad()
        for part in (slice(0, 2), slice(2, 4)):
            (loss_of(model, x[..., :], y) * (part.stop / 4)).backward()
        optimizer.step()
    return [model]


def averaging_weights(distribute, data):
    import torch

    model = net()
    optimizer = distribute(adam(model), model)
    kept = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    copied = copy.deepcopy(model)
    for x, y in data:
        train_on(model, optimizer, x, y)
        kept.update_parameters(model)
    loss_of(copied, *next(iter(batches()))).backward()  # a copy is nobody's business
    return [model, kept.module]


def checkpointing(distribute, data):
    """Without nesting, which test_published.py tries."""
    import torch
    from torch.utils.checkpoint import checkpoint

    model = net()
    optimizer = distribute(adam(model), model)
    for x, y in data:
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=False)
        out = checkpoint(model[2:], hidden, use_reentrant=False)
        ((out - y) ** 2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [model]


def checkpointing_a_shared_layer(distribute, data):
    """Its gradient grows twice in one backward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer, head = torch.nn.Linear(FEATURES, FEATURES).double(), torch.nn.Linear(FEATURES, 1).double()
    model = torch.nn.Sequential(layer, head)
    optimizer = distribute(adam(model), model, bucket_mb=1e-5)
    for x, y in data:
        optimizer.zero_grad()
        hidden = checkpoint(layer, x.requires_grad_(), use_reentrant=True).tanh()
        hidden = checkpoint(layer, hidden, use_reentrant=True).tanh()
        ((head(hidden) - y) ** 2).mean().backward()
        optimizer.step()
    return [model]


def compiling(distribute, data):
    import torch

    model = net()
    optimizer = distribute(adam(model), model)
    compiled = torch.compile(model, backend="aot_eager")
    for x, y in data:
        optimizer.zero_grad()
        loss_of(compiled, x, y).backward()
        torch.nn.utils.clip_grad_norm_(compiled.parameters(), 0.05)
        optimizer.step()
    return [model]


def compiling_the_whole_step(distribute, data):
    import torch

    model = net()
    optimizer = distribute(adam(model), model)

    @torch.compile(backend="aot_eager")
    def step(x, y):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    for x, y in data:
        step(x, y)
    return [model]


def distributing_anew(distribute, data):
    """A second optimizer for the second stage; the first is forgotten, or, as here, still in use."""
    model = net()
    first, second = distribute(momentum(model.parameters()), model), None
    for step, (x, y) in enumerate(data):
        if step == 2:
            second = distribute(adam(model), model)
        optimizer = second if second is not None and step != 3 else first
        train_on(model, optimizer, x, y)
    return [model]


def moving_to_another_type(distribute, data):
    model = net()
    optimizer = distribute(momentum(model.parameters(), momentum=0), model)
    for step, (x, y) in enumerate(data):
        if step == 1:
            model.float()
        if step == 3:
            model.double()
        kind = next(model.parameters()).dtype
        train_on(model, optimizer, x.to(kind), y.to(kind))
    return [model]


def embeddings(distribute, data, **options):
    import torch

    torch.manual_seed(0)
    table, head = torch.nn.Embedding(30, 4, sparse=True).double(), torch.nn.Linear(4, 1).double()
    model = torch.nn.ModuleList([table, head])
    optimizer = distribute(momentum(model.parameters(), momentum=0, lr=0.5), model, **options)
    for x, y in data:
        optimizer.zero_grad()
        ((head(table((x[:, 0] * 7).long() % 30)) - y) ** 2).mean().backward()
        optimizer.step()
    return [model]


def embeddings_made_dense(distribute, data):
    return embeddings(distribute, data, **({} if distribute is plain else {"sparse_as_dense": True}))


def tables_alone(distribute, data):
    """As word2vec: no gradient is dense."""
    import torch

    torch.manual_seed(0)
    tables = torch.nn.ModuleList([torch.nn.Embedding(30, 4, sparse=True).double() for _ in range(2)])
    optimizer = distribute(torch.optim.SparseAdam(list(tables.parameters()), lr=0.1), tables)
    for x, _ in data:
        optimizer.zero_grad()
        word, context = ((x[:, at] * 7).long() % 30 for at in (0, 1))
        torch.nn.functional.softplus((tables[0](word) * tables[1](context)).sum(1)).mean().backward()
        optimizer.step()
    return [tables]


def rotations(distribute, data):
    """Complex parameters beside real ones."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.Linear(FEATURES, 2).to(torch.complex128)
    optimizer = distribute(momentum(layer.parameters()), layer)
    for x, y in data:
        optimizer.zero_grad()
        (layer(x.to(torch.complex128)).abs() - y).square().mean().backward()
        optimizer.step()
    return [torch.nn.ParameterList([torch.view_as_real(one.detach()) for one in layer.parameters()])]


def images(distribute, data):
    """Weights in channels_last."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1)).double()
    model = model.to(memory_format=torch.channels_last)
    optimizer = distribute(momentum(model.parameters()), model)
    for x, y in data:
        optimizer.zero_grad(set_to_none=False)
        picture = x.repeat(1, 18).reshape(len(x), 3, 6, 6).contiguous(memory_format=torch.channels_last)
        loss_of(model, picture, y).backward()
        optimizer.step()
    return [model]


def training_a_head(distribute, data):
    """The body is neither frozen nor in the optimizer, and its gradients count in the norm."""
    import torch

    model = net()
    optimizer = distribute(momentum(model[2].parameters()), model)
    for x, y in data:
        model.zero_grad()
        loss_of(model, x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [model]


def gradients_that_are_kept(distribute, data):
    """Two losses whose gradients are projected onto each other, and one of the step before that is looked at again."""
    model = net()
    optimizer = distribute(momentum(model.parameters()), model)
    last = None
    for x, y in data:
        parts = []
        for half in (slice(0, 2), slice(2, 4)):
            optimizer.zero_grad()
            loss_of(model, x[:, :], y * half.stop).backward()
            parts.append([one.grad for one in model.parameters()])
        detached = [one.grad.detach() for one in model.parameters()]
        for one, first, second in zip(model.parameters(), *parts, strict=True):
            one.grad = first + second * (first * second).sum().sign()
        if last is not None:
            for one, before in zip(model.parameters(), last, strict=True):
                one.grad += 0.1 * before
        optimizer.step()
        last = detached
    return [model]


def gradients_that_are_assigned(distribute, data):
    """Clipping by hand, in three styles."""
    import torch

    model = net()
    optimizer = distribute(momentum(model.parameters()), model)
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, x, y).backward()
        for one in model.parameters():
            one.grad.data = one.grad.data.clamp(-0.1, 0.1)
            one.grad.data.mul_(0.5)
            if step == 3:
                one.grad = torch.tanh(one.grad)
        optimizer.step()
    return [model]


def gradients_that_are_detached_in_place(distribute, data):
    """As optimizers wrote their own ``zero_grad`` before PyTorch 1.7, and still do."""
    model = net()
    optimizer = distribute(momentum(model.parameters()), model)
    for x, y in data:
        for one in model.parameters():
            if one.grad is not None:
                one.grad.detach_()
                one.grad.zero_()
        loss_of(model, x, y).backward()
        optimizer.step()
    return [model]


def gradients_in_one_flat_buffer(distribute, data):
    """The program's own, which it zeroes and clips at once."""
    import torch

    model = net()
    optimizer = distribute(momentum(model.parameters()), model)
    sizes = [one.numel() for one in model.parameters()]
    flat = torch.zeros(sum(sizes), dtype=torch.float64)
    for one, part in zip(model.parameters(), flat.split(sizes), strict=True):
        one.grad = part.view_as(one)
    for x, y in data:
        flat.zero_()
        loss_of(model, x, y).backward()
        flat *= (0.1 / flat.norm()).clamp(max=1)
        optimizer.step()
    return [model]


def gradients_that_the_program_makes_and_holds(distribute, data):
    import torch

    model = net()
    optimizer = distribute(momentum(model.parameters()), model)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    gradients = [one.grad for one in model.parameters()]
    for x, y in data:
        torch._foreach_zero_(gradients)
        loss_of(model, x, y).backward()
        torch._foreach_mul_(gradients, 0.5)
        optimizer.step()
    return [model]


def gradients_of_a_copy_that_both_hold(distribute, data):
    """A3C: the copy's gradients become the model's once, and grow there from then on."""
    model = net()
    worker = copy.deepcopy(model)
    optimizer = distribute(momentum(model.parameters()), model)
    for x, y in data:
        worker.load_state_dict(model.state_dict())
        worker.zero_grad(set_to_none=False)
        loss_of(worker, x, y).backward()
        for one, other in zip(model.parameters(), worker.parameters(), strict=True):
            if one.grad is None:
                one.grad = other.grad
        optimizer.step()
    return [model]


def expanded_gradients_that_the_program_holds(distribute, data):
    """Of a sum of weights: nothing can be written into their memory."""
    import torch

    model = net()
    optimizer = distribute(momentum(model.parameters()), model)
    for x, _ in data:
        loss = sum(one.sum() for one in model.parameters()) * x.mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for one, gradient in zip(model.parameters(), gradients, strict=True):
            one.grad = gradient
        optimizer.step()
    return [model]


def freezing_between_forward_and_backward(distribute, data):
    """Autograd then adds no gradient, and still calls the hooks."""
    model = net()
    optimizer = distribute(momentum(model.parameters()), model)
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        model.requires_grad_(True)
        loss = loss_of(model, x, y)
        model[0].requires_grad_(step == 0)
        loss.backward()
        optimizer.step()
    return [model]


def hooks_on_what_adds_up(distribute, data):
    """Of the program's own, one put before and one after ``distribute``: in place, and by another tensor."""
    model = net()

    def halve(parameter):
        parameter.grad *= 0.5

    def replace(parameter):
        parameter.grad = 3 * parameter.grad

    model[0].weight.register_post_accumulate_grad_hook(halve)
    optimizer = distribute(momentum(model.parameters()), model, **({} if distribute is plain else {"bucket_mb": 1e-5}))
    model[0].bias.register_post_accumulate_grad_hook(halve)
    model[2].weight.register_post_accumulate_grad_hook(replace)
    for x, y in data:
        train_on(model, optimizer, x, y)
    return [model]


def a_large_layer(distribute, data):
    """A bucket of some MB, in huge pages; the last gradients are kept and used."""
    model = net(width=60_000)
    optimizer = distribute(momentum(model.parameters(), lr=1e-5), model)
    last = []
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        for one, before in zip(model.parameters(), last, strict=False):
            one.grad += 0.1 * before
        optimizer.step()
        last = [one.grad for one in model.parameters()]
    return [model]


def cutting_channels_in_place(distribute, data):
    """The numbers that are left lie where they lay."""
    model = net()
    optimizer = distribute(momentum(model.parameters(), momentum=0), model)
    for step, (x, y) in enumerate(data):
        if step == 2:
            for one, part in zip(model.parameters(), (slice(3), slice(3), (slice(None), slice(3))), strict=False):
                one.data, one.grad = one.data[part], None
        train_on(model, optimizer, x, y)
    return [model]


def backwards_of_some_parameters_each(distribute, data):
    model = net()
    optimizer = distribute(momentum(model.parameters()), model)
    for x, y in data:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward(inputs=list(model[2].parameters()), retain_graph=True)
        loss.backward(inputs=list(model[0].parameters()))
        optimizer.step()
    return [model]


def rows_that_are_assigned(distribute, data):
    """Sparse gradients of no backward, which travel as dense ones."""
    import torch

    torch.manual_seed(0)
    table = torch.nn.Embedding(10, 3, sparse=True).double()
    options = {} if distribute is plain else {"sparse_as_dense": True}
    optimizer = distribute(momentum(table.parameters(), momentum=0), table, **options)
    for x, _ in data:
        optimizer.zero_grad()
        loss = (table((x[:, 0] * 3).long() % 10) ** 2).mean()
        (table.weight.grad,) = torch.autograd.grad(loss, [table.weight])
        optimizer.step()
    return [table]


def sharpness(distribute, data):
    """SAM: an optimizer that is stepped by hand, twice a batch, with another one inside."""
    import torch

    class Sharpness(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"rho": 0.05})
            self.inner = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)

        @torch.no_grad()
        def climb(self):
            held = [one for one in self.param_groups[0]["params"] if one.grad is not None]
            norm = torch.stack([one.grad.norm() for one in held]).norm()
            for one in held:
                self.state[one]["way"] = one.grad * (0.05 / norm)
                one.add_(self.state[one]["way"])
            self.zero_grad()

        @torch.no_grad()
        def descend(self):
            for one in self.param_groups[0]["params"]:
                one.sub_(self.state[one]["way"])
            self.inner.step()
            self.zero_grad()

    model = net()
    optimizer = distribute(Sharpness(model.parameters()), model)
    for x, y in data:
        loss_of(model, x, y).backward()
        optimizer.climb()
        loss_of(model, x, y).backward()
        optimizer.descend()
    return [model]


PROGRAMS = [
    clipped_by_value_before_distribute_was_called,
    scaling,
    closures,
    lbfgs,
    a_closure_beside_another_argument,
    two_models_in_one_backward,
    two_optimizers_on_one_model,
    an_optimizer_of_some_parameters_of_another,
    replacing_a_layer,
    unfreezing,
    adding_a_group,
    layers_that_no_step_uses,
    layers_that_some_ranks_use,
    accumulating,
    averaging_weights,
    checkpointing,
    checkpointing_a_shared_layer,
    compiling,
    compiling_the_whole_step,
    distributing_anew,
    moving_to_another_type,
    embeddings,
    embeddings_made_dense,
    tables_alone,
    rotations,
    images,
    training_a_head,
    gradients_that_are_kept,
    gradients_that_are_assigned,
    gradients_that_are_detached_in_place,
    gradients_in_one_flat_buffer,
    gradients_that_the_program_makes_and_holds,
    gradients_of_a_copy_that_both_hold,
    expanded_gradients_that_the_program_holds,
    freezing_between_forward_and_backward,
    hooks_on_what_adds_up,
    a_large_layer,
    cutting_channels_in_place,
    backwards_of_some_parameters_each,
    rows_that_are_assigned,
    sharpness,
]


def furthest(ours: Any, theirs: Any) -> float:
    pairs = [
        (one, other)
        for mine, alone in zip(ours, theirs, strict=True)
        for one, other in zip(mine.parameters(), alone.parameters(), strict=True)
    ]
    return max((one.detach().double() - other.detach().double()).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
@on_ranks("torch", n=2)
def test_a_program_equals_one_process_on_the_union_batch(hk, world, program):
    alone = program(plain, batches())
    ours = program(hk.distribute, batches(world))
    assert furthest(alone, program(plain, batches(steps=STEPS - 1))) > 1e-6  # each step counts
    assert furthest(ours, alone) < (1e-5 if program.__name__ == "moving_to_another_type" else 1e-9)
    for model in ours:
        hk.check_agreement(model, None, world)


@pytest.mark.parametrize("program", [layers_that_some_ranks_use, scaling, embeddings], ids=lambda one: one.__name__)
@on_ranks("torch", n=3)
def test_a_program_whose_ranks_differ_equals_one_process(hk, world, program):
    test_a_program_equals_one_process_on_the_union_batch(hk, world, program)


@on_ranks("torch", n=3)
def test_backwards_may_reach_other_optimizers_on_other_ranks(hk, world):
    """An optimizer for each expert, of which each rank's batch takes one; nothing takes the last expert."""

    def train(distribute, ranks):
        experts = [net(seed) for seed in range(4)]
        optimizers = [distribute(momentum(one.parameters(), weight_decay=0.3), one) for one in experts]
        if distribute is hk.distribute:
            hk.broadcast_state(experts[0], optimizers[0])
        for step, (x, y) in enumerate(batches()):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for rank in ranks:
                share = slice(rank, None, world.size)
                loss = loss_of(experts[(rank + step) % world.size], x[share], y[share])
                (loss / len(ranks)).backward()
            for optimizer in optimizers:
                optimizer.step()
        return experts

    ours, alone = train(hk.distribute, [world.rank]), train(plain, range(world.size))
    assert furthest(alone[:2], [net(0), net(1)]) > 1e-3
    assert furthest(ours, alone) < 1e-9


@on_ranks("torch", n=3, fresh=True)
def test_ranks_of_a_process_set_may_reach_other_optimizers(hk, everyone):
    """Ranks 0 and 2 train one of two models each; rank 1 trains both alone, and is asked by nobody."""
    import horovod.torch as hvd

    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    world, models = hk.init(), [net(0), net(1)]
    optimizers = [hk.distribute(momentum(one.parameters()), one, process_set=pair) for one in models]
    both = [net(0), net(1)]
    alone = [momentum(one.parameters()) for one in both]
    for step, (x, y) in enumerate(batches()):
        for optimizer in optimizers + alone:
            optimizer.zero_grad()
        chosen = range(2) if world.rank == 1 or step == 0 else [(world.rank // 2 + step) % 2]  # they meet in step 0
        sum(loss_of(models[one], x, y) for one in chosen).backward()
        weight = 1.0 if world.rank == 1 or step == 0 else 0.5
        (weight * sum(loss_of(one, x, y) for one in both)).backward()
        for optimizer in optimizers + alone:
            optimizer.step()
    everyone(None)  # the end of a rank would end the others' process set
    assert furthest(models, both) < 1e-9


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("how", ["no_sync", "backward_passes_per_step"])
@on_ranks("torch", n=2)
def test_passes_without_an_exchange_are_averaged_with_the_next(hk, world, how, passes):
    """The last window has fewer passes than the others: the step exchanges what no backward did."""

    def train(distribute, data):
        model = net()
        optimizer = distribute(adam(model), model)
        gradients = []
        data = list(data)
        for number, (x, y) in enumerate(data):
            last = (number + 1) % passes == 0
            if how == "no_sync" and distribute is not plain and not last:
                with hk.no_sync(model):
                    loss_of(model, x, y).backward()
            else:
                loss_of(model, x, y).backward()
            if last or number == len(data) - 1:
                optimizer.step()
                gradients.append(model[0].weight.grad.clone())
                optimizer.zero_grad()
        return model, gradients

    def distribute(optimizer, model):
        options = {"backward_passes_per_step": passes} if how == "backward_passes_per_step" else {}
        return hk.distribute(optimizer, model, **options)

    (alone, theirs), (ours, mine) = train(plain, batches()), train(distribute, batches(world))
    assert furthest([ours], [alone]) < 1e-9
    assert all((one - other).abs().max() < 1e-12 for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("wrapped", ["an optimizer", "another class"])
@on_ranks("torch", n=2)
def test_an_optimizer_within_another_steps_with_the_mean(hk, world, wrapped):
    """The outer one is distributed; the program steps the inner one, after backwards that exchanged nothing."""
    import torch

    class Slow(torch.optim.Optimizer):
        def __init__(self, inner):
            if wrapped == "an optimizer":
                super().__init__(inner.param_groups, {})
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self, closure=None):
            return self.inner.step(closure)

    def train(distribute, data):
        model = net()
        inner = momentum(model.parameters())
        outer = distribute(Slow(inner), model)
        for step, (x, y) in enumerate(data):
            inner.zero_grad()
            with nullcontext() if distribute is plain else hk.no_sync(model):
                loss_of(model, x, y).backward()
            (inner if step % 2 else outer).step()
        return [model]

    assert furthest(train(hk.distribute, batches(world)), train(plain, batches())) < 1e-9


@on_ranks("torch", n=2)
def test_gradients_that_are_assigned_before_a_wrapper_s_step_are_averaged(hk, world):
    """Lookahead as it is published: it never calls ``Optimizer.__init__``, and no hook sees its steps."""
    import torch

    class Slow(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups, self.state = inner, inner.param_groups, {}

        def step(self, closure=None):
            return self.inner.step(closure)

        def state_dict(self):
            return self.inner.state_dict()

        def load_state_dict(self, state_dict):
            self.inner.load_state_dict(state_dict)  # which has other groups from now on

    def train(distribute, data):
        model = net()
        optimizer = distribute(Slow(momentum(model.parameters())), model)
        if distribute is not plain:
            hk.broadcast_state(model, optimizer)
        for x, y in data:
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss_of(model, x, y), parameters)
            for one, gradient in zip(parameters, gradients, strict=True):
                one.grad = gradient
            optimizer.step()
        return [model]

    assert furthest(train(hk.distribute, batches(world)), train(plain, batches())) < 1e-9


@on_ranks("torch", n=2)
def test_a_step_that_changes_gradients_and_calls_super_exchanges_once(hk, world):
    """LARS over SGD: both steps are an optimizer's, and in between nothing is to be averaged, or warned of."""
    import torch

    class Scaled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for one in self.param_groups[0]["params"]:
                one.grad *= one.norm() / (one.grad.norm() + 1)
            return super().step(closure)

    def train(distribute, data):
        model = net()
        momentum(model.parameters())  # from its first instance on, SGD's own step calls hooks
        optimizer = distribute(Scaled(model.parameters(), lr=0.05), model)
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            if step == 3:  # after a step, what is assigned is a rank's own again
                gradients = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
                for one, gradient in zip(model.parameters(), gradients, strict=True):
                    one.grad = gradient
            else:
                loss_of(model, x, y).backward()
            optimizer.step()
        return [model]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = train(hk.distribute, batches(world))
    assert furthest(ours, train(plain, batches())) < 1e-9


@on_ranks("torch", n=2)
def test_a_step_with_clipped_gradients_of_one_rank_is_refused(hk, world):
    import torch

    model = net()
    optimizer = hk.distribute(adam(model), model)
    x, y = next(batches(world))
    with hk.no_sync(model):
        loss_of(model, x, y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(hvdkit.InvalidArgumentError, match="gradients of this rank alone were changed"):
        optimizer.step()
    with hk.no_sync(model):
        loss_of(model, x, y).backward()
    model[0].weight.grad = model[0].weight.grad.clamp(-0.1, 0.1)
    with pytest.raises(hvdkit.InvalidArgumentError, match="gradients of this rank alone were changed"):
        optimizer.step()
    for wrong, message in ((net(), "a model whose optimizer"), (optimizer, "takes the model, got Adam")):
        with pytest.raises(hvdkit.InvalidArgumentError, match=message), hk.no_sync(wrong):
            pass


def step_by_hand(parameter: Any) -> None:
    """As LOMO does it: no optimizer steps, and the gradient is freed."""
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


@pytest.mark.parametrize("whose", ["the distributed optimizer", "one for each parameter", "by hand"])
@on_ranks("torch", n=2)
def test_a_step_within_backward_is_refused(hk, world, whose):
    model = net()
    optimizer = hk.distribute(adam(model), model)
    for one in model.parameters():
        stepping = momentum([one]) if whose == "one for each parameter" else optimizer
        hook = step_by_hand if whose == "by hand" else lambda _, stepping=stepping: stepping.step()
        one.register_post_accumulate_grad_hook(hook)
    with pytest.raises(hvdkit.InvalidArgumentError, match="step after backward"):
        loss_of(model, *next(batches(world))).backward()


@pytest.mark.parametrize("beside", ["nothing", "another optimizer"])
@pytest.mark.parametrize("first", [0, 2])
@on_ranks("torch", n=3)
def test_ranks_that_call_no_backward_before_a_step_are_one_error_on_every_rank(hk, world, first, beside):
    """They would clip what they have: nothing, where the others clip the mean."""
    model, other = net(), net(1)
    optimizer = hk.distribute(adam(model), model)
    if beside != "nothing":
        hk.distribute(adam(other), other)
    for step, (x, y) in enumerate(batches(world, steps=3)):
        with pytest.raises(hvdkit.AgreementError, match="without a backward") if step == first else nullcontext():
            optimizer.zero_grad()
            if step != first or world.rank != 1:
                loss_of(model, x, y).backward()
            optimizer.step()
        if step == first:
            return


@on_ranks("torch", n=2)
def test_two_threads_that_train_at_a_time_are_refused(hk, world):
    import threading

    one, other = net(), net()
    for model in (one, other):
        hk.distribute(adam(model), model)
    x, y = next(batches(world))
    refused = []

    def second():
        try:
            loss_of(other, x, y).backward()
        except hvdkit.InvalidArgumentError as error:
            refused.append(str(error))

    def start_another(gradient):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    one[0].weight.register_hook(start_another)
    loss_of(one, x, y).backward()
    assert "two threads are in backward()" in refused[0]


@on_ranks("torch", n=2)
def test_a_model_that_is_no_longer_used_is_freed(hk, world):
    import gc
    import weakref

    from hvdkit.torch import exchange as inside

    before, kept = len(inside.exchanges()), []
    for op in ("average", "sum"):
        model = net()
        optimizer = hk.distribute(adam(model), model, op=op)
        x, y = next(batches(world))
        with hk.no_sync(model):
            loss_of(model, x, y).backward()
        loss_of(model, x, y).backward()
        optimizer.step()
        with hk.no_sync(model):
            loss_of(model, x, y).backward()
        kept += [weakref.ref(one) for one in model.parameters()]
        del model, optimizer
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)
    assert len(inside.exchanges()) == before


@on_ranks("torch", n=2)
def test_no_sync_keeps_gradients_local(hk, world, everyone):
    model = net()
    hk.distribute(adam(model), model)
    x, y = next(batches(world))
    with hk.no_sync(model):
        loss_of(model, x, y).backward()
    one, other = everyone(float(model[0].weight.grad.sum()))
    assert one != other
    loss_of(model, x, y).backward()
    one, other = everyone(float(model[0].weight.grad.sum()))
    assert one == other


@on_ranks("torch", n=3)
def test_ranks_that_train_different_parameters_get_one_error_each(hk, world, everyone):
    model = net()
    optimizer = hk.distribute(adam(model), model)
    for step, (x, y) in enumerate(batches(world, steps=3)):
        if step == 2 and world.rank == 1:
            model[0].requires_grad_(False)
        if step < 2:
            loss_of(model, x, y).backward()
            optimizer.step()
            continue
        with pytest.raises(hvdkit.AgreementError) as refused:
            loss_of(model, x, y).backward()
    assert "train different parameters" in str(refused.value) and "freeze and add them alike" in str(refused.value)


@on_ranks("torch", n=2)
def test_ranks_that_distribute_differently_get_one_error_each(hk, world):
    model = net()
    hk.distribute(adam(model), model, backward_passes_per_step=1, compression="fp16" if world.rank else "none")
    with pytest.raises(hvdkit.AgreementError, match="compression='"):
        loss_of(model, *next(batches(world))).backward()


@on_ranks("torch", n=2)
def test_a_backward_that_raises_leaves_nothing_behind(hk, world):
    """A hook of the user's own raises, on every rank, after gradients have been sent."""

    def train(distribute, data):
        model = net()
        optimizer = distribute(adam(model), model, **({} if distribute is plain else {"bucket_mb": 1e-5}))
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            if step in (2, 3):

                def fail(gradient):
                    raise ArithmeticError("refused")

                hook = model[0].weight.register_hook(fail)
                with pytest.raises(ArithmeticError):
                    loss_of(model, x, y).backward()
                hook.remove()
                optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        return [model]

    assert furthest(train(hk.distribute, batches(world)), train(plain, batches())) < 1e-9


@pytest.mark.parametrize("beside", ["nothing", "another before", "another after"])
@on_ranks("torch", n=3)
def test_a_backward_that_raises_on_one_rank_is_one_error_on_every_rank(hk, world, beside):
    """Out of memory, which the program catches: the other ranks wait for the gradients that it has not sent."""
    model, other = net(), net(1)
    if beside == "another before":
        hk.distribute(adam(other), other)
    optimizer = hk.distribute(adam(model), model, bucket_mb=1e-5)
    if beside == "another after":
        hk.distribute(adam(other), other)

    def fail(gradient):
        raise ArithmeticError("out of memory")

    with pytest.raises(hvdkit.AgreementError, match="ended with an error on some ranks"):
        for step, (x, y) in enumerate(batches(world)):
            optimizer.zero_grad()
            hook = model[0].weight.register_hook(fail if (step, world.rank) == (2, 0) else lambda gradient: gradient)
            try:
                (loss_of(other, x, y) + loss_of(model, x, y)).backward()
            except ArithmeticError:
                continue
            finally:
                hook.remove()
            optimizer.step()

    def train(distribute, data):
        optimizer = distribute(adam(other := net(2)), other)
        for x, y in data:
            train_on(other, optimizer, x, y)
        return [other]

    assert furthest(train(hk.distribute, batches(world)), train(plain, batches())) < 1e-9  # nothing waits any more


@on_ranks("torch", n=2)
def test_a_sum_stays_the_sum_when_gradients_accumulate(hk, world, everyone):
    model = net()
    optimizer = hk.distribute(momentum(model.parameters()), model, op="sum")
    x, y = next(batches(world))
    mine = net()
    loss_of(mine, x, y).backward()
    parts = everyone(mine[0].weight.grad.tolist())
    import torch

    total = torch.tensor(parts, dtype=torch.float64).sum(dim=0)
    for count in (1, 2, 3):
        loss_of(model, x, y).backward()
        assert (model[0].weight.grad - count * total).abs().max() < 1e-12
    assert optimizer is optimizer


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@on_ranks("torch", n=2)
def test_narrow_types_travel_and_stay_themselves(hk, world, everyone, kind):
    import torch

    model = net().to(getattr(torch, kind))
    hk.distribute(momentum(model.parameters()), model)
    x, y = (one.to(getattr(torch, kind)) for one in next(batches(world)))
    alone = copy.deepcopy(model)
    loss_of(alone, x, y).backward()
    loss_of(model, x, y).backward()
    parts = torch.tensor(everyone(alone[0].weight.grad.double().tolist()))
    gradient = model[0].weight.grad
    assert gradient.dtype == getattr(torch, kind)
    assert torch.equal(gradient, parts.mean(dim=0).to(gradient.dtype).double().to(gradient.dtype))


@pytest.mark.parametrize("options", [{"groups": 2}, {"bucket_mb": 1e-5}, {"compression": "fp16"}])
@on_ranks("torch", n=2)
def test_other_ways_to_travel_give_the_same(hk, world, options):
    def train(distribute, data):
        model = net()
        optimizer = distribute(momentum(model.parameters()), model, **options)
        for x, y in data:
            train_on(model, optimizer, x, y)
        return [model]

    assert furthest(train(hk.distribute, batches(world)), train(plain, batches())) < (
        1e-3 if "compression" in options else 1e-9
    )


@on_ranks("torch", n=3)
def test_buckets_hold_what_the_first_backward_of_rank_0_gave_one_after_the_other(hk, world, monkeypatch):
    """Not what was registered so; other ranks run the layers in an order of their own."""
    import torch

    from hvdkit.torch.buckets import Reducer

    def train(distribute, ranks, sees):
        torch.manual_seed(0)
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False).double() for name in "abcd"})
        optimizer = distribute(momentum(layers.parameters()), layers, bucket_mb=2 * 128e-6)
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                x = torch.full((2, 4), 1.0 + rank + step, dtype=torch.float64)
                for name in ("bdac", "abcd", "dcba")[rank]:
                    x = torch.tanh(layers[name](x))
                (x.sum() / len(ranks)).backward()
            optimizer.step()
            sees(step)
        return [layers]

    sent, plain_start = [], Reducer.start
    monkeypatch.setattr(Reducer, "start", lambda *a: sent.append(a[3]) or plain_start(*a))
    by_step = {}
    trained = train(hk.distribute, [world.rank], lambda step: by_step.update({step: [*sent]}) or sent.clear())
    assert sorted(name.partition(".")[2].partition(".")[2] for name in by_step[2]) == [
        "c.weight .. a.weight",
        "d.weight .. b.weight",
    ]
    assert furthest(trained, train(plain, range(world.size), lambda _: None)) < 1e-12


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@on_ranks("torch", n=2)
def test_a_parameter_that_stands_twice_in_a_group_is_summed_once(hk, world, everyone):
    model = net()
    hk.distribute(momentum([*model.parameters(), model[0].weight]), model, op="sum")
    x, y = next(batches(world))
    alone = net()
    loss_of(alone, x, y).backward()
    loss_of(model, x, y).backward()
    one, other = everyone(float(alone[0].weight.grad.sum()))
    assert float(model[0].weight.grad.sum()) == pytest.approx(one + other)


@on_ranks("torch", n=2)
def test_the_optimizer_stays_the_same_object_and_is_distributed_once(hk, world):
    model = net()
    optimizer = adam(model)
    assert hk.distribute(optimizer, model) is optimizer
    with pytest.raises(hvdkit.InvalidArgumentError, match="distributed already"):
        hk.distribute(optimizer, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_mb": 0}, "bucket_mb must be a positive, finite number of MB, got 0"),
        ({"groups": 0}, "groups must be an integer >= 1, got 0"),
    ],
)
@on_ranks("torch", n=1)
def test_options_that_cannot_be_are_refused(hk, options, message):
    with pytest.raises(hvdkit.InvalidArgumentError, match=message):
        model = net()
        hk.distribute(adam(model), model, **options)


@on_ranks("torch", n=1)
def test_what_cannot_travel_is_refused_when_it_is_distributed(hk, world):
    import torch

    lazy, nowhere = torch.nn.LazyLinear(3), torch.nn.Linear(2, 2, device="meta")
    wider = net().bfloat16()
    refused = [(lazy, "it has no data yet"), (nowhere, "it has no data yet")]
    if hasattr(wider[0].weight, "grad_dtype"):  # since PyTorch 2.10
        wider[0].weight.grad_dtype = torch.float32
        refused.append((wider, "its grad_dtype is torch.float32, and its own is torch.bfloat16"))
    for model, message in refused:
        with pytest.raises(hvdkit.InvalidArgumentError, match=message):
            hk.distribute(torch.optim.SGD(model.parameters(), 0.1), model)
    with pytest.raises(hvdkit.InvalidArgumentError, match="as optimizer it got Linear"):
        hk.distribute(net()[0], net())
    with pytest.raises(hvdkit.InvalidArgumentError, match="as model it got list"):
        hk.distribute(adam(net()), [net()])


@on_ranks("torch", n=2)
def test_gradients_that_cannot_be_averaged_are_refused_in_backward(hk, world):
    import torch

    model = net()
    optimizer = hk.distribute(adam(model), model)
    x, y = next(batches(world))
    loss_of(model, x, y).backward()
    optimizer.zero_grad()
    with pytest.raises(hvdkit.InvalidArgumentError, match="create_graph=True"):
        loss_of(model, x, y).backward(create_graph=True)
    table = torch.nn.Parameter(torch.zeros(5, 2))
    owner = torch.nn.ParameterList([table])
    hk.distribute(torch.optim.SGD([table], 0.1), owner)
    with pytest.raises(hvdkit.InvalidArgumentError, match="sparse_as_dense=True"):
        torch.nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()


@on_ranks("torch", n=3, mpi=True)
def test_tensors_that_travel_in_parts_are_whole(hk, world):
    """Horovod as hvdkit builds it reduces 4 MiB at a time between ranks of one host."""
    import horovod.torch as hvd
    import torch

    for number, dtype in enumerate((torch.float16, torch.float32, torch.float64, torch.int32)):
        given = torch.arange(3_000_001).remainder(7).to(dtype)
        mine = given + world.rank
        expected = given * world.size + sum(range(world.size))
        assert hvd.allreduce(mine, op=hvd.Sum, name=f"parts.{number}").equal(expected)
        assert mine.equal(given + world.rank)
        both = hvd.grouped_allreduce([mine, mine + 1], op=hvd.Sum, name=f"parts.both.{number}")
        assert both[0].equal(expected)
        assert both[1].equal(expected + world.size)
        if dtype.is_floating_point:
            mean = hvd.allreduce(mine, op=hvd.Average, name=f"parts.mean.{number}", prescale_factor=2.0)
            assert torch.allclose(mean, 2 * expected / world.size, rtol=2e-3)


@on_ranks("torch", n=1)
def test_a_bucket_lies_in_whole_huge_pages(hk, world, monkeypatch):
    """The kernel gives none for a part of one."""
    import mmap

    import torch

    from hvdkit.torch import buckets

    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    mapped, make = [], mmap.mmap

    def keep(*given: Any) -> Any:
        mapped.append(make(*given))
        return mapped[-1]

    monkeypatch.setattr(buckets.mmap, "mmap", keep)
    page, cpu = 2**21, torch.device("cpu")
    for length in (242_774, page // 4, page // 4 + 1, 3_000_001):
        bucket = buckets._zeros(length, torch.float32, cpu)
        start = torch.frombuffer(mapped[-1], dtype=torch.uint8).data_ptr()
        assert bucket.data_ptr() % page == 0
        assert bucket.data_ptr() + -(-bucket.nbytes // page) * page <= start + len(mapped[-1])
    assert len(mapped) == 4
