"""The learning rate's warmup as a PyTorch scheduler; the inside of ``hvdkit.torch.warmup``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdkit.steps.learning_rate import WarmupBase
from hvdkit.steps.topology import Topology

_STATE = ("last_epoch", "base_lrs", "_step_count", "_last_lr")


class Warmup(WarmupBase, torch.optim.lr_scheduler.LambdaLR):
    """Multiplies the scaled learning rates by the warmup's multiplier, and then by that of ``after``.

    Made by ``hvdkit.torch.warmup``. Call ``step()`` after every step of the optimizer.

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
        self._begin(world, steps_per_epoch, epochs, rule, after)
        super().__init__(optimizer, self._multiplier)

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is; not the number of ranks, nor ``after``: these are made anew."""
        return {name: vars(self)[name] for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; the optimizer's rates come back with the optimizer."""
        vars(self).update({name: state_dict[name] for name in _STATE})

    def follow(self, world: Topology, steps_per_epoch: int) -> None:
        """Become the schedule of another number of ranks; ``go_to`` then sets the rates."""
        raised = self._set_size(world, steps_per_epoch)
        self.base_lrs = [rate * raised for rate in self.base_lrs]

    def go_to(self, steps: int) -> None:
        """Set the rates to those after ``steps`` steps, whatever they are now."""
        self.last_epoch = steps
        for group, full in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["initial_lr"] = full
            set_rate(group, full * self._multiplier(steps))
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set the learning rate of an optimizer's group, in place where it is a tensor: a compiled step reads that one."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
