"""hvdkit.torch.weighted_loss over samples and over targets: the mean over ranks is the loss of one process.

Each rank has texts of TOKENS tokens with FEATURES numbers each, padded with -100: rank r has 2 + r texts.
"""

from typing import Any

import pytest
from ranks import on_ranks

import hvdkit

TOKENS, FEATURES, CLASSES = 5, 3, 4


def texts(rank: int, padded: bool = True) -> tuple[Any, Any]:
    """(m, t, FEATURES) and (m, t); of rank 1 no token counts."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2 + rank, TOKENS, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (2 + rank, TOKENS), generator=generator)
    if padded:
        for text in range(2 + rank):
            y[text, 0 if rank == 1 else TOKENS - text - rank :] = -100
    return x, y


def net() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, CLASSES).double()


def gradient(model: Any, loss: Any) -> list[float]:
    import torch

    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).tolist()


def distributed(hk: Any) -> Any:
    import torch

    model = net()
    hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)
    return model


def classes_second(logits: Any, y: Any) -> tuple[Any, Any]:
    return logits.transpose(1, 2), y


def flat(logits: Any, y: Any) -> tuple[Any, Any]:
    return logits.reshape(-1, CLASSES), y.reshape(-1)


def losses() -> dict[str, Any]:
    import torch
    from torch.nn import CrossEntropyLoss

    shares = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    return {
        "plain": CrossEntropyLoss(),
        "class weights": CrossEntropyLoss(weight=shares),
        "smoothed": CrossEntropyLoss(weight=shares, label_smoothing=0.1),
        "function": torch.nn.functional.cross_entropy,
    }


@on_ranks("torch", n=3)
@pytest.mark.parametrize("form", [classes_second, flat])
@pytest.mark.parametrize("name", ["plain", "class weights", "smoothed", "function"])
def test_over_targets_is_one_process_on_the_tokens_of_all_ranks(hk, world, everyone, form, name):
    import torch

    loss, model, alone = losses()[name], distributed(hk), net()
    loss_of = hk.weighted_loss(loss, over="targets")
    x, y = texts(world.rank)
    union = [torch.cat(parts) for parts in zip(*map(texts, range(world.size)), strict=True)]
    whole = loss(*form(alone(union[0]), union[1]))
    part = loss_of(*form(model(x), y))
    assert sum(everyone(part.item())) / world.size == pytest.approx(whole.item(), rel=1e-12)
    assert gradient(model, part) == pytest.approx(gradient(alone, whole), rel=1e-10)


@on_ranks("torch", n=3)
@pytest.mark.parametrize("form", [classes_second, flat])
def test_over_targets_leaves_out_fillers(hk, world, form):
    """The last rank has no sample of its own: what it computes counts nothing."""
    import torch

    model, alone = distributed(hk), net()
    loss_of = hk.weighted_loss(torch.nn.CrossEntropyLoss(), over="targets")
    real = range(world.size - 1)
    counts = [len(texts(rank)[1]) for rank in real]
    weight = counts[world.rank] * world.size / sum(counts) if world.rank in real else 0.0
    x, y = texts(world.rank if weight else 4)
    union = [torch.cat(parts) for parts in zip(*map(texts, real), strict=True)]
    whole = torch.nn.functional.cross_entropy(*form(alone(union[0]), union[1]))
    part = loss_of(*form(model(x), y), torch.full((len(y),), weight, dtype=torch.float64))
    assert gradient(model, part) == pytest.approx(gradient(alone, whole), rel=1e-10)


@on_ranks("torch", n=3)
def test_over_targets_takes_probabilities_and_numbers(hk, world):
    import torch

    for loss in (torch.nn.CrossEntropyLoss(), torch.nn.MSELoss()):
        model, alone = distributed(hk), net()
        loss_of = hk.weighted_loss(loss, over="targets")
        every = [texts(rank)[0].flatten(0, 1) for rank in range(world.size)]
        x, union = every[world.rank], torch.cat(every)
        part = loss_of(model(x), x.new_ones(len(x), CLASSES) / CLASSES)
        whole = loss(alone(union), union.new_ones(len(union), CLASSES) / CLASSES)
        assert gradient(model, part) == pytest.approx(gradient(alone, whole), rel=1e-10)


@on_ranks("torch", n=3)
@pytest.mark.parametrize("form", [classes_second, flat])
def test_over_samples_takes_texts_of_equal_length_in_both_forms(hk, world, form):
    import torch

    model, alone = distributed(hk), net()
    loss_of = hk.weighted_loss(torch.nn.CrossEntropyLoss())
    every = [texts(rank, padded=False) for rank in range(world.size)]
    x, y = every[world.rank]
    union = [torch.cat(parts) for parts in zip(*every, strict=True)]
    whole = torch.nn.functional.cross_entropy(*form(alone(union[0]), union[1]))
    weights = torch.full((len(y),), len(y) * world.size / len(union[1]), dtype=torch.float64)
    assert gradient(model, loss_of(*form(model(x), y), weights)) == pytest.approx(gradient(alone, whole), rel=1e-10)


@on_ranks("torch", n=3)
def test_the_divergence_of_a_distillation_is_a_mean_over_samples(hk, world):
    """``KLDivLoss(reduction="batchmean")`` adds up a sample's classes."""
    import torch

    model, alone, loss = distributed(hk), net(), torch.nn.KLDivLoss(reduction="batchmean")
    every = [texts(rank, padded=False)[0][:, 0] for rank in range(world.size)]
    x, union = every[world.rank], torch.cat(every)
    weights = torch.full((len(x),), len(x) * world.size / len(union), dtype=torch.float64)

    def both(model: Any, x: Any) -> tuple[Any, Any]:
        return model(x).log_softmax(1), torch.nn.functional.pad(x, (0, 1)).softmax(1)

    found = gradient(model, hk.weighted_loss(loss)(*both(model, x), weights))
    assert found == pytest.approx(gradient(alone, loss(*both(alone, union))), rel=1e-10)


@on_ranks("torch", n=3)
def test_a_model_that_returns_its_own_mean_over_tokens(hk, world):
    """As docs/agreement.md has it."""
    import torch

    def own_loss(model: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(*flat(model(x), y))

    model, alone = distributed(hk), net()
    every = [texts(2 * rank) for rank in range(world.size)]  # a mean over no token is no number
    x, y = every[world.rank]
    count = (y != -100).sum().item()
    mean = hk.average_metrics({"tokens": count}, world)["tokens"]
    union = [torch.cat(parts) for parts in zip(*every, strict=True)]
    found = gradient(model, own_loss(model, x, y) * count / mean)
    assert found == pytest.approx(gradient(alone, own_loss(alone, *union)), rel=1e-10)


@on_ranks("torch", n=1)
def test_losses_that_would_be_another_mean_are_refused(hk, world):
    import torch
    from torch.nn import CrossEntropyLoss, functional

    x, y = texts(0)
    logits = net()(x)
    unequal = torch.tensor([2.0, 0.5])
    for make, part in (
        (lambda: hk.weighted_loss(functional.cross_entropy)(*flat(logits, y)), "cross_entropy then .*over='targets'"),
        (lambda: hk.weighted_loss(CrossEntropyLoss(weight=torch.ones(4))), "over='targets' to divide by those of all"),
        (
            lambda: hk.weighted_loss(lambda a, b: a.mean())(logits, y),
            "a single number; make the loss with reduction='n",
        ),
        (lambda: hk.weighted_loss(torch.nn.KLDivLoss(reduction="sum")), "only means are the same"),
        (lambda: hk.weighted_loss(CrossEntropyLoss(), over="tokens"), "'samples' or 'targets', got 'tokens'"),
        (lambda: hk.weighted_loss(CrossEntropyLoss(reduction="none"), over="targets"), "with reduction='mean'"),
        (lambda: hk.weighted_loss(lambda output, target: output, over="targets"), "with reduction='mean'"),
        (lambda: hk.weighted_loss(CrossEntropyLoss())(*flat(logits, y.clamp(0)), unequal), "must be equal"),
        (lambda: hk.weighted_loss(CrossEntropyLoss(), over="targets")(*flat(logits, y), unequal), "must be equal"),
        (lambda: hk.weighted_loss(CrossEntropyLoss())(*flat(logits, y.clamp(0)), torch.ones(3)), r"got \(3,\) for"),
    ):
        with pytest.raises(hvdkit.InvalidArgumentError, match=part):
            make()
