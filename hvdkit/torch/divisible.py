"""Whether the work of an optimizer can be divided among ranks, found by trying; used by ``sharded``.

No list of names could tell: clipping by a global norm, block-wise 8-bit states and learned rates come by an argument.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.torch.state import keeps_its_state_itself

_NUMBERS = 8192  # of each tensor that is tried, more than a block of an 8-bit state
_STEPS, _RATE = 3, 0.01
Tensors = list[torch.Tensor]
Groups = list[dict[str, Any]]


def works_on_numbers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it does with each number what it would do without the others; False: with each parameter.

    Steps the same optimizer, with the same settings, on random tensors, as a whole and in parts.

    Raises:
        InvalidArgumentError: neither, or it is no optimizer whose state lies in ``state``.
    """
    name = type(optimizer).__name__
    reasons = {
        "steps another one": any(isinstance(one, torch.optim.Optimizer) for one in vars(optimizer).values()),
        "has a state_dict of its own": keeps_its_state_itself(optimizer),
        "changes parameters by its state in eval() and train()": hasattr(optimizer, "eval"),
    }
    for why in (why for why, holds in reasons.items() if holds):
        raise InvalidArgumentError(f"shard_state=True cannot divide the state of {name}, which {why}; leave it out.")
    settings = _settings(optimizer)
    tensors = [list(_tensors_like(parameters)) for _, parameters in settings]
    groups = [group for group, _ in settings]
    try:
        whole = _stepped(optimizer, groups, tensors, [0] * sum(map(len, tensors)))
    except Exception as error:
        raise InvalidArgumentError(
            f"shard_state=True cannot divide the state of {name}: a step of it on other tensors ends with "
            f"{type(error).__name__}: {error}; leave it out."
        ) from error
    with contextlib.suppress(Exception):  # Muon's, for example, where it is given no matrix
        if _alike(whole, _cut(optimizer, groups, tensors)):
            return True
    with contextlib.suppress(Exception):
        if _alike(whole, _stepped(optimizer, groups, tensors, range(len(whole.tensors)))):
            return False
    raise InvalidArgumentError(
        f"shard_state=True cannot divide the state of {name}: what it does with one parameter depends on others (it "
        "clips by a norm of all, or learns its rate); clip before the step, or leave it out."
    )


class _Stepped(NamedTuple):
    """What tensors became, and by each optimizer what its groups hold beside them, such as a rate that it learns."""

    tensors: Tensors
    groups: list[Groups]


def _settings(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Tensors]]:
    """The groups that differ in their settings, with a learning rate that shows, and what they train."""
    found: dict[str, tuple[dict[str, Any], Tensors]] = {}
    for group in optimizer.param_groups:
        kept = {key: value for key, value in group.items() if key != "params" and not key.startswith("param_names")}
        if "lr" in kept:
            kept["lr"] = torch.full_like(kept["lr"], _RATE) if isinstance(kept["lr"], torch.Tensor) else _RATE
        kind = repr({key: value for key, value in kept.items() if key != "initial_lr"})
        found.setdefault(kind, (kept, []))[1].extend(group["params"])
    return list(found.values())


def _tensors_like(parameters: Tensors) -> Iterator[torch.Tensor]:
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


def _cut(optimizer: torch.optim.Optimizer, groups: Groups, tensors: Sequence[Tensors]) -> _Stepped:
    """As ``_stepped`` by two optimizers, of which each has a part of every tensor."""
    at = [[one.numel() * 3 // 8 + 1 if one.numel() > 1 else 1 for one in members] for members in tensors]
    parts = [
        [part for one, stop in zip(members, stops, strict=True) for part in one.reshape(-1).tensor_split((stop,))]
        for members, stops in zip(tensors, at, strict=True)
    ]
    stepped = _stepped(optimizer, groups, parts, [0, 1] * sum(map(len, tensors)))
    shapes = [one.shape for members in tensors for one in members]
    pairs = zip(stepped.tensors[::2], stepped.tensors[1::2], shapes, strict=True)
    return _Stepped([torch.cat((first, second)).reshape(shape) for first, second, shape in pairs], stepped.groups)


def _stepped(
    optimizer: torch.optim.Optimizer, groups: Groups, tensors: Sequence[Tensors], owners: Sequence[int]
) -> _Stepped:
    """What tensors become by optimizers like this one; ``owners``: which of these has each of the tensors."""
    parameters = [[torch.nn.Parameter(one.clone()) for one in members] for members in tensors]
    owner_of = dict(zip((id(one) for members in parameters for one in members), owners, strict=True))
    devices = {one.device for members in tensors for one in members if one.is_cuda}
    after: list[Groups] = []
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        for owner in sorted(set(owners)):
            stepping = _like(optimizer)
            stepping.param_groups = [
                {**group, "params": [one for one in members if owner_of[id(one)] == owner]}
                for group, members in zip(groups, parameters, strict=True)
            ]
            step = inspect.unwrap(type(optimizer).step)  # whose wrapper tells everybody of a step
            for number in range(_STEPS):
                for one in (one for members in parameters for one in members if owner_of[id(one)] == owner):
                    one.grad = torch.sin(one * (number + 2)) + one / 3
                step(stepping)
            after.append(stepping.param_groups)
    return _Stepped([one.detach() for members in parameters for one in members], after)


def _like(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer with the same attributes, which steps nothing yet, and of whose steps nobody hears."""
    made: Any = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    for name in ("step", "add_param_group"):
        vars(made).pop(name, None)
    made.state = collections.defaultdict(dict)
    return made


def _alike(whole: _Stepped, parts: _Stepped) -> bool:
    (groups,) = whole.groups
    return all(map(_equal, whole.tensors, parts.tensors)) and all(
        one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items() if key != "params")
        for mine in parts.groups
        for one, other in zip(groups, mine, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        eps = torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else 0.0
        return torch.allclose(one, other, rtol=100 * eps, atol=100 * eps, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12) or one != one != other
    return bool(one == other)
