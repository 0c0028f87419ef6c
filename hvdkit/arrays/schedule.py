"""The learning rate's warmup as a function of the step; the inside of ``hvdkit.arrays.warmup``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import learning_rate
from hvdkit.steps.topology import Topology


def warmup(
    lr: float, world: Topology, steps_per_epoch: int, epochs: float, rule: str, after: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    """See ``hvdkit.arrays.warmup``."""
    if not lr > 0:
        raise InvalidArgumentError(f"lr must be a positive number, from scale_lr, got {lr!r}.")
    length = learning_rate.warmup_steps(epochs, steps_per_epoch)
    start = 1.0 / learning_rate.scale_factor(world.size, rule)

    def rate(step: Any) -> Any:
        """The learning rate after ``step`` steps: a number, or an array of any framework that computes with numbers."""
        # Arithmetic in place of a branch, so that the step may be an array that has no value yet (inside jax.jit).
        within = (step < length) * 1.0
        later = 1.0 if after is None else after(step - length)
        return lr * (within * (start + (1.0 - start) * step / max(length, 1)) + (1.0 - within) * later)

    return rate
