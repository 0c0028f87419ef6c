"""The learning rate's warmup for loops of one's own in TensorFlow; the inside of ``hvdkit.tensorflow.warmup``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.learning_rate import WarmupBase
from hvdkit.steps.topology import Topology
from hvdkit.tensorflow.state import require_eager


class Warmup(WarmupBase):
    """Multiplies the scaled learning rate by the warmup's multiplier, and then by that of ``after``.

    Made by ``hvdkit.tensorflow.warmup``. It counts the optimizer's own steps; ``go_to`` puts the count where
    the data are.

    Args:
        optimizer: a Keras optimizer made with a number as its rate, the one scaled for ``world`` by ``rule``.
        world, steps_per_epoch, epochs, rule, after: see ``hvdkit.tensorflow.warmup``.
    Raises:
        InvalidArgumentError: the optimizer's rate follows a schedule of its own.
    """

    def __init__(
        self,
        optimizer: Any,
        world: Topology,
        steps_per_epoch: int,
        epochs: float,
        rule: str,
        after: Callable[[int], float] | None,
    ) -> None:
        self._optimizer = optimizer
        self._begin(world, steps_per_epoch, epochs, rule, after)
        self._scaled = float(np.asarray(optimizer.learning_rate))
        self._ahead = 0  # steps that the schedule is further than the optimizer has counted
        self.step()

    def _counted(self) -> int:
        return int(np.asarray(self._optimizer.iterations))

    def step(self) -> None:
        """Set the rate for the next step; after a restored checkpoint the warmup goes on where it was."""
        require_eager("warmup's step")
        rate = self._scaled * self._multiplier(self._counted() + self._ahead)
        try:
            self._optimizer.learning_rate = rate
        except (TypeError, AttributeError):
            raise InvalidArgumentError(
                "the optimizer's learning rate follows a schedule of its own and cannot be set; make it with a number."
            ) from None

    def follow(self, world: Topology, steps_per_epoch: int) -> None:
        """Become the schedule of another number of ranks; ``go_to`` then sets the rate."""
        self._scaled *= self._set_size(world, steps_per_epoch)

    def go_to(self, steps: int) -> None:
        """Set the rate to that after ``steps`` steps, whatever it is now and however many the optimizer has taken."""
        self._ahead = steps - self._counted()
        self.step()
