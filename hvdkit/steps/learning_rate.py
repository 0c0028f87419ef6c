"""Step 3: the learning rate of a larger global batch, and its gradual warmup."""

from __future__ import annotations

import math
from collections.abc import Callable

from hvdkit.errors import InvalidArgumentError, finite, whole
from hvdkit.steps.topology import Topology

_FACTORS: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda _: 1.0}
"""By how much a rule raises the rate for so many processes."""
RULES = tuple(_FACTORS)


def scale_factor(size: int, rule: str = "linear") -> float:
    """By how much ``rule`` raises the learning rate for ``size`` processes.

    Raises:
        InvalidArgumentError: an unknown rule, or size < 1.
    Source: linear: Goyal et al. 2017, arXiv:1706.02677, section 2.1; sqrt: Krizhevsky 2014, arXiv:1404.5997, section 5.
    """
    if size < 1:
        raise InvalidArgumentError(f"size must be at least 1 process, got {size}.")
    if rule not in RULES:
        raise InvalidArgumentError(f"rule must be one of {', '.join(RULES)}, got {rule!r}.")
    return _FACTORS[rule](size)


def scale_lr(base_lr: float, world: Topology, rule: str = "linear") -> float:
    """Learning rate for the global batch (step 3).

    Args:
        base_lr: rate tuned for one process, > 0.
        world: the job; only ``size`` is used.
        rule: "linear" (base_lr * size), "sqrt" (base_lr * sqrt(size)) or "none".
    Returns:
        The scaled rate, same unit.
    Raises:
        InvalidArgumentError: base_lr not positive and finite, or an unknown rule.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.1.
    """
    return finite("base_lr", base_lr, positive=True) * scale_factor(world.size, rule)


def warmup_multiplier(step: int, warmup_steps: int, factor: float) -> float:
    """What to multiply the *scaled* learning rate with after ``step`` steps have been taken.

    Linear in the step: ``1/factor`` (the base rate) at step 0, 1 (the scaled rate) from ``warmup_steps`` on, so that
    with 8 workers, base 0.01 and 3 epochs the rate at the ends of the epochs is 0.0333, 0.0567 and 0.0800.

    Args:
        step: optimizer steps completed, >= 0.
        warmup_steps: steps of the warmup, >= 0; 0 is no warmup.
        factor: scaled rate / base rate, >= 1 (``scale_factor``).
    Raises:
        InvalidArgumentError: a negative number of steps or factor < 1.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2 (gradual warmup).
    """
    if step < 0 or warmup_steps < 0:
        raise InvalidArgumentError(f"step and warmup_steps must be >= 0, got {step} and {warmup_steps}.")
    if not (math.isfinite(factor) and factor >= 1):
        raise InvalidArgumentError(f"factor must be a finite number >= 1, got {factor!r}.")
    if step >= warmup_steps:
        return 1.0
    start = 1.0 / factor
    return start + (1.0 - start) * (step / warmup_steps)


class WarmupBase:
    """The part of a framework binding's ``Warmup`` that knows no framework: each step's multiplier on so many ranks."""

    def _begin(
        self, world: Topology, steps_per_epoch: int, epochs: float, rule: str, after: Callable[[int], float] | None
    ) -> None:
        self._epochs, self._rule, self._after = epochs, rule, after
        self._factor = 1.0
        self._set_size(world, steps_per_epoch)

    def _set_size(self, world: Topology, steps_per_epoch: int) -> float:
        """Take another number of ranks; returns what the scaled rates are multiplied by."""
        before, self._factor = self._factor, scale_factor(world.size, self._rule)
        self._length = warmup_steps(self._epochs, steps_per_epoch)
        return self._factor / before

    def _multiplier(self, step: int) -> float:
        if self._after is not None and step >= self._length:
            return self._after(step - self._length)
        return warmup_multiplier(step, self._length, self._factor)


def warmup_steps(epochs: float, steps_per_epoch: int) -> int:
    """Number of optimizer steps in ``epochs`` epochs of warmup, rounded to whole steps.

    Raises:
        InvalidArgumentError: epochs negative or not finite, or steps_per_epoch < 1.
    """
    if not (isinstance(epochs, (int, float)) and math.isfinite(epochs) and epochs >= 0):
        raise InvalidArgumentError(f"warmup epochs must be a finite number >= 0, got {epochs!r}.")
    return round(epochs * whole("steps_per_epoch", steps_per_epoch, 1))
