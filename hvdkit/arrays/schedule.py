"""The learning rate's warmup as a function of the step (step 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import learning_rate
from hvdkit.steps.topology import Topology


def warmup(
    lr: float,
    world: Topology,
    steps_per_epoch: int,
    epochs: float = 5,
    rule: str = "linear",
    after: Callable[[Any], Any] | None = None,
) -> Callable[[Any], Any]:
    """Gradual warmup from the base learning rate to the scaled one (step 3), as a function of the step.

    Args:
        lr: the scaled rate, from ``scale_lr`` with the same rule.
        world: the job; only ``size`` is used.
        steps_per_epoch: optimizer steps in an epoch, from ``steps_per_epoch``.
        epochs: length of the warmup in epochs; 0 is none.
        rule: the rule that scaled the rate: "linear", "sqrt" or "none".
        after: multiplier by the number of steps since the end of the warmup, for a decay that follows it.
    Returns:
        The rate after ``step`` completed steps: lr/factor at 0, linear in between, lr from the end of the warmup on.
        The step may be a number or an array, traced ones of ``jax.jit`` included: it serves as a schedule of optax.
    Raises:
        InvalidArgumentError: a number out of range or an unknown rule.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2.
    """
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
