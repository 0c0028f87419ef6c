"""What happens before and after each optimizer's step, distributed or not; what ``optimizer`` asks for once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvdkit.steps import passes
from hvdkit.torch import divergence
from hvdkit.torch.backward import eagerly
from hvdkit.torch.exchange import Exchange
from hvdkit.torch.multi_optimizer import exchanges

_COUNTED = "_hvdkit_counted"


@functools.cache
def look_at_steps() -> None:
    """Have every optimizer's steps seen, from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@eagerly
def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No step with gradients of one rank: exchange what no backward did, and average a closure's loss."""
    found = exchanges()
    if not any(one.steps_as(optimizer) for one in found):
        divergence.UNDISTRIBUTED.look(optimizer, lambda: [named for one in found for named in one.training()])
    for one in found:
        one.take_fingerprint(optimizer)
    if len(args) > 1 and callable(args[1]):
        args = (args[0], _averaging(found, optimizer, args[1]), *args[2:])
    elif callable(kwargs.get("closure")):
        kwargs = {**kwargs, "closure": _averaging(found, optimizer, kwargs["closure"])}
    else:
        for one in found:
            one.step_by(optimizer)
    return args, kwargs


def _averaging(found: list[Exchange], optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    return next((one.averaging(closure) for one in found if one.steps_as(optimizer)), closure)


@eagerly
def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
    found = exchanges()
    if any(one.steps_as(optimizer) for one in found):
        passes.stepped()
    for one in found:
        one.stepped(optimizer)


def count_steps(optimizer: Any) -> None:
    """Count the steps of an optimizer that may never be distributed, for ``passes``."""
    passes.expect_steps()
    if hasattr(optimizer, "_optimizer_step_post_hooks") and not hasattr(optimizer, _COUNTED):
        optimizer.register_step_post_hook(_count)
        setattr(optimizer, _COUNTED, True)


@eagerly
def _count(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
    passes.stepped()
