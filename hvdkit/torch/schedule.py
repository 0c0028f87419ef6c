"""The learning rate's warmup as a PyTorch scheduler; the inside of ``hvdkit.torch.warmup``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdkit.steps import learning_rate
from hvdkit.steps.topology import Topology


class Warmup(torch.optim.lr_scheduler.LambdaLR):
    """Multiplies the scaled learning rates by the warmup's multiplier, and then by that of ``after``.

    Args:
        optimizer: made with the rates scaled for ``world`` by ``rule``.
        world, steps_per_epoch, epochs, rule, after: see ``hvdkit.torch.warmup``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world: Topology,
        steps_per_epoch: int,
        epochs: float,
        rule: str,
        after: Callable[[int], float] | None,
    ) -> None:
        self._epochs, self._rule, self._after = epochs, rule, after
        self._set_size(world, steps_per_epoch)
        super().__init__(optimizer, self._multiplier)

    def _set_size(self, world: Topology, steps_per_epoch: int) -> None:
        self._factor = learning_rate.scale_factor(world.size, self._rule)
        self._length = learning_rate.warmup_steps(self._epochs, steps_per_epoch)

    def _multiplier(self, step: int) -> float:
        if self._after is not None and step >= self._length:
            return self._after(step - self._length)
        return learning_rate.warmup_multiplier(step, self._length, self._factor)

    def follow(self, world: Topology, steps_per_epoch: int) -> None:
        """Become the schedule of another number of ranks; ``go_to`` then sets the rates."""
        before = self._factor
        self._set_size(world, steps_per_epoch)
        self.base_lrs = [rate * self._factor / before for rate in self.base_lrs]

    def go_to(self, steps: int) -> None:
        """Set the rates to those after ``steps`` steps, whatever they are now."""
        self.last_epoch = steps
        for group, full in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["initial_lr"] = full
            group["lr"] = full * self._multiplier(steps)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
