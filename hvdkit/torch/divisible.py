"""Whether the work of an optimizer can be divided among ranks, found by trying; used by ``sharded``.

No list of names could tell: clipping by a global norm, block-wise 8-bit states and learned rates come by an argument.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.torch.state import keeps_its_state_itself

_NUMBERS = 8192  # of each tensor that is tried, more than a block of an 8-bit state
_TRIALS = itertools.count()
_STEPS, _RATE = 3, 0.01
Tensors = Sequence[torch.Tensor]
Settings = list[dict[str, Any]]  # of parameter groups, such as a rate, which an optimizer may learn


def works_on_numbers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it does with each number what it would do without the others; False: with each parameter.

    Steps the same optimizer, with the same settings, on random tensors, as a whole and in parts.
    """
    name = type(optimizer).__name__
    reasons = {
        "steps another one": any(isinstance(one, torch.optim.Optimizer) for one in vars(optimizer).values()),
        "has a state_dict of its own": keeps_its_state_itself(optimizer),
        "changes parameters by its state in eval() and train()": hasattr(optimizer, "eval"),
    }
    for why in (why for why, holds in reasons.items() if holds):
        raise InvalidArgumentError(f"shard_state=True cannot divide the state of {name}, which {why}; leave it out.")
    settings, tensors = _like_those_of(optimizer)
    try:
        whole, after = _stepped(optimizer, settings, tensors)
    except Exception as error:
        raise InvalidArgumentError(
            f"shard_state=True cannot divide the state of {name}: a step of it on other tensors ends with "
            f"{type(error).__name__}: {error}; leave it out."
        ) from error
    with contextlib.suppress(Exception):  # Muon's, for example, where it is given no matrix
        cut = [[one.reshape(-1).tensor_split((3 * one.numel() // 8 + 1,)) for one in members] for members in tensors]
        halves = [
            _stepped(optimizer, settings, [[pair[side] for pair in members] for members in cut]) for side in (0, 1)
        ]
        joined = [torch.cat(pair) for pair in zip(*(parts for parts, _ in halves), strict=True)]
        if _alike([one.reshape(-1) for one in whole], after, joined, [settings for _, settings in halves]):
            return True
    with contextlib.suppress(Exception):
        alone = [
            _stepped(optimizer, settings, [[one] if members is own else [] for members in tensors])
            for own in tensors
            for one in own
        ]
        if _alike(whole, after, [one for parts, _ in alone for one in parts], [settings for _, settings in alone]):
            return False
    raise InvalidArgumentError(
        f"shard_state=True cannot divide the state of {name}: what it does with one parameter depends on others (it "
        "clips by a norm of all, or learns its rate); clip before the step, or leave it out."
    )


def _like_those_of(optimizer: torch.optim.Optimizer) -> tuple[Settings, list[Tensors]]:
    """The groups that differ in their settings, with a learning rate that shows, and tensors like those of each."""
    found: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {}
    for group in optimizer.param_groups:
        kept = {key: value for key, value in group.items() if key != "params" and not key.startswith("param_names")}
        if "lr" in kept:
            kept["lr"] = torch.full_like(kept["lr"], _RATE) if isinstance(kept["lr"], torch.Tensor) else _RATE
        kind = repr({key: value for key, value in kept.items() if key != "initial_lr"})
        found.setdefault(kind, (kept, []))[1].extend(group["params"])
    return [kept for kept, _ in found.values()], [list(_random_like(members)) for _, members in found.values()]


def _random_like(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Two random tensors for each number of dimensions, type and device; 16 bits would hide small differences."""
    seeded = torch.Generator().manual_seed(0)
    kinds = {(one.dim(), torch.promote_types(one.dtype, torch.float32), one.device): None for one in parameters}
    for dimensions, dtype, device in (*kinds, *kinds):
        shape = [1] * dimensions
        for axis in itertools.cycle(range(dimensions - 1, -1, -1)) if dimensions else ():
            if torch.Size(shape).numel() >= _NUMBERS:
                break
            shape[axis] *= 2
        yield torch.randn(shape, dtype=dtype, generator=seeded).to(device)


def _stepped(
    optimizer: torch.optim.Optimizer, settings: Settings, tensors: Sequence[Tensors]
) -> tuple[Tensors, Settings]:
    """What the tensors of each group, and its settings, become by an optimizer like this one."""
    stepping: Any = object.__new__(type(optimizer))
    vars(stepping).update(vars(optimizer))
    for name in ("step", "add_param_group"):
        vars(stepping).pop(name, None)
    stepping.state = collections.defaultdict(dict)
    parameters = [[torch.nn.Parameter(one.clone()) for one in members] for members in tensors]
    stepping.param_groups = [{**kept, "params": [*members]} for kept, members in zip(settings, parameters, strict=True)]
    step = inspect.unwrap(type(optimizer).step)  # whose wrapper tells everybody of a step
    trained = [one for members in parameters for one in members]
    with torch.random.fork_rng(devices=list({one.device for one in trained if one.is_cuda})), torch.no_grad():
        torch.manual_seed(next(_TRIALS))  # one that draws does something else in each trial, as on each rank
        for number in range(_STEPS):
            for one in trained:
                one.grad = torch.sin(one * (number + 2)) + one / 3
            step(stepping)
    return [one.detach() for one in trained], stepping.param_groups


def _alike(whole: Tensors, after: Settings, parts: Tensors, after_parts: list[Settings]) -> bool:
    groups = [pair for settings in after_parts for pair in zip(after, settings, strict=True)]
    return all(map(_equal, whole, parts)) and all(
        one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items() if key != "params")
        for one, other in groups
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        eps = torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else 0.0
        return torch.allclose(one, other, rtol=100 * eps, atol=100 * eps, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12) or one != one != other
    return bool(one == other)
