"""The learning rate callbacks of ``hvdkit.keras``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import keras

from hvdkit.errors import InvalidArgumentError
from hvdkit.keras.data import trained_on
from hvdkit.keras.optimizer import held_by
from hvdkit.keras.trainer.callbacks import Callback
from hvdkit.steps import learning_rate
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.keras_optimizer import by_name, inner_optimizers, rated, rates, require_keras_3, shown


class _Rate(Callback, ABC):
    """Multiplies the learning rate that an optimizer had when it was given or when Keras first showed it.

    Without one given, those of all optimizers that the model holds.
    """

    def __init__(self, steps_per_epoch: int | None) -> None:
        super().__init__()
        self._steps = steps_per_epoch
        self._given: Any = None
        self._known: dict[str, Any] = {}
        self._full: list[float] = []
        self._epoch = 0

    def give(self, optimizer: Any) -> None:
        """Steer this optimizer alone, its rate now being the full one.

        Raises:
            InvalidArgumentError: the rate follows a schedule of the optimizer's own.
        """
        self._given = optimizer
        self._remember(by_name(optimizer))

    def _remember(self, optimizers: dict[str, Any]) -> None:
        self._known = optimizers
        self._full = rates(optimizers)
        self.multiply(1.0)

    def multiply(self, multiplier: float) -> None:
        """Set the rates to the full ones times ``multiplier``."""
        if self._model is not None:
            _ = self.model  # on jax this brings the variables up to date
        for (name, optimizer), full in zip(rated(self._known), self._full, strict=True):
            try:
                optimizer.learning_rate = full * multiplier
            except (TypeError, AttributeError):
                raise InvalidArgumentError(
                    f"{type(self).__name__} cannot set the learning rate of {shown({name: optimizer})}, which follows "
                    "a schedule of its own; make that optimizer with a number, or give warmup the one that is meant."
                ) from None

    def set_model(self, model: Any) -> None:
        """Called by Keras, before any callback may restore an older rate."""
        super().set_model(model)
        held = held_by(model)
        if not held:
            require_keras_3(getattr(model, "optimizer", None), keras.optimizers.Optimizer, type(self).__name__)
        if self._given is None:
            if list(held.values()) != list(self._known.values()):
                self._remember(held)
            return
        names = [name for name, one in held.items() if self._given in (one, *inner_optimizers(one))]
        if not names:
            raise InvalidArgumentError(
                f"{type(self).__name__} was made for {self._given.name!r} ({type(self._given).__name__}), which the "
                f"model does not hold, but {shown(held)}; give it one of these, or make it an attribute of the model."
            )
        self._known = {names[0]: self._given}

    def steps(self) -> int:
        """Steps per epoch, from the caller or from Keras."""
        steps = self._steps or (self.params or {}).get("steps")
        if not steps:
            raise InvalidArgumentError(
                f"{type(self).__name__} needs the number of steps in an epoch, and Keras does not know it for this "
                "data; give steps_per_epoch."
            )
        return int(steps)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._epoch = epoch
        data = trained_on(self.model)
        self.after_steps(epoch * self.steps() + (data.steps_done if data is not None else 0))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.after_steps(self._epoch * self.steps() + batch + 1)

    @abstractmethod
    def after_steps(self, completed: int) -> None:
        """Set the rate, if it is this callback's turn after so many steps."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        _ = self.model  # on jax this brings the variables up to date
        for name, optimizer in self._known.items():
            now = rates(optimizer)
            if logs is not None and len(now) == 1:
                logs["learning_rate" if name == "optimizer" else f"{name}_learning_rate"] = now[0]


class Warmup(learning_rate.WarmupBase, _Rate):
    """Gradual warmup from the base learning rate to the scaled one, step by step (step 3).

    After k completed steps the rate is the scaled one times ``warmup_multiplier(k, ...)``; ``fit`` logs it as
    ``learning_rate``, that of an attribute of the model as ``NAME_learning_rate``. With 8 workers, base 0.01 and 3
    epochs the epochs end with 0.0333, 0.0567 and 0.0800. When the warmup is over, the rate is left to other callbacks.

    Made by ``warmup`` it works on the optimizer given there, else on all that the model holds.

    Args:
        world: the job; only ``size`` is used.
        steps_per_epoch: optimizer steps in an epoch; default: what ``fit`` knows.
        epochs: length of the warmup in epochs; 0 is none.
        rule: the rule that scaled the optimizer's rate: "linear", "sqrt" or "none".
        after: multiplier by the number of steps since the end of the warmup, for a decay that follows it.
    Raises:
        InvalidArgumentError: a number out of range or an unknown rule.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2.
    """

    def __init__(
        self,
        world: Topology,
        steps_per_epoch: int | None = None,
        epochs: float = 5,
        rule: str = "linear",
        after: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(steps_per_epoch)
        self._begin(world, 1 if steps_per_epoch is None else steps_per_epoch, epochs, rule, after)

    def after_steps(self, completed: int) -> None:
        """Set the rate while the warmup lasts, at its end, and beyond it only by ``after``."""
        self._length = learning_rate.warmup_steps(self._epochs, self.steps())
        if self._after is not None or completed <= self._length:
            self.multiply(self._multiplier(completed))

    def follow(self, world: Topology, steps_per_epoch: int) -> None:
        """Become the schedule of another number of ranks; ``go_to`` then sets the rates."""
        raised = self._set_size(world, steps_per_epoch)
        self._full = [full * raised for full in self._full]
        self._steps = steps_per_epoch if self._steps is not None else None

    def go_to(self, steps: int) -> None:
        """Set the rate to that after ``steps`` steps, where it is still the warmup's."""
        if self._known and (self._steps or (self.params or {}).get("steps")):
            self.after_steps(steps)


class LearningRateSchedule(_Rate):
    """Multiplies the scaled learning rate from ``start_epoch`` up to, not including, ``end_epoch``.

    Args:
        multiplier: a number, or a function of the epoch.
        start_epoch: first epoch, >= 0.
        end_epoch: first epoch that is no longer this schedule's; default: none.
        staircase: True: one value for each whole epoch; False: a new one after every step, the function being given
            completed steps / steps per epoch.
        steps_per_epoch: optimizer steps in an epoch; default: what ``fit`` knows.
    Raises:
        InvalidArgumentError: an empty range of epochs.
    """

    def __init__(
        self,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(steps_per_epoch)
        if start_epoch < 0 or (end_epoch is not None and end_epoch <= start_epoch):
            raise InvalidArgumentError(
                f"epochs must be 0 <= start_epoch < end_epoch, got {start_epoch} and {end_epoch}."
            )
        self._multiplier = multiplier
        self._start, self._end = start_epoch, end_epoch
        self._staircase = staircase

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._staircase:
            self._apply(epoch)
        else:
            super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._staircase:
            super().on_train_batch_end(batch, logs)

    def after_steps(self, completed: int) -> None:
        """Set the rate of a smooth schedule."""
        self._apply(completed / self.steps())

    def _apply(self, epoch: float) -> None:
        if epoch < self._start or (self._end is not None and epoch >= self._end):
            return
        self.multiply(self._multiplier(epoch) if callable(self._multiplier) else self._multiplier)
