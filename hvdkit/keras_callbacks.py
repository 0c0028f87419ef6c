"""Callbacks for Keras' ``fit``; the inside of ``hvdkit.keras``.

In the list, ``AverageMetrics`` belongs before whatever decides by the metrics (``EarlyStopping``, ...).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import numpy.typing as npt

from hvdkit import keras_state
from hvdkit.errors import InvalidArgumentError
from hvdkit.keras_optimizer import require_keras_3
from hvdkit.keras_transport import TRANSPORT
from hvdkit.steps import learning_rate
from hvdkit.steps.checkpoint import CheckpointDirectory, Saved
from hvdkit.steps.topology import Topology


class _Callback(keras.callbacks.Callback):  # type: ignore[misc]
    def set_model(self, model: Any) -> None:
        """Called by Keras."""
        require_keras_3(model, keras.Model, type(self).__name__)
        super().set_model(model)


class _Rate(_Callback, ABC):
    """Multiplies the learning rate that the optimizer had when Keras first showed it to this callback."""

    def __init__(self, steps_per_epoch: int | None) -> None:
        super().__init__()
        self._steps = steps_per_epoch
        self._known: Any = None
        self._full: list[float] = []
        self._epoch = 0

    def remember(self, optimizer: Any) -> None:
        """Take the optimizer's rate as the full one, now and not when training begins.

        Raises:
            InvalidArgumentError: the rate follows a schedule of the optimizer's own.
        """
        self._known = optimizer
        self._full = [keras_state.number(one.learning_rate) for one in _rated(optimizer)]
        self.multiply(1.0)

    def multiply(self, multiplier: float) -> None:
        """Set the rate to the full one times ``multiplier``."""
        for optimizer, full in zip(_rated(self._known), self._full, strict=True):
            try:
                optimizer.learning_rate = full * multiplier
            except (TypeError, AttributeError):
                raise InvalidArgumentError(
                    f"{type(self).__name__} cannot set a learning rate that follows a schedule of the optimizer's "
                    "own; make the optimizer with a number."
                ) from None

    def set_model(self, model: Any) -> None:
        """Called by Keras, before any callback may restore an older rate."""
        super().set_model(model)
        require_keras_3(model.optimizer, keras.optimizers.Optimizer, type(self).__name__)
        if model.optimizer is not self._known:
            self.remember(model.optimizer)

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
        """Called by Keras."""
        self._epoch = epoch
        self.after_steps(epoch * self.steps())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self.after_steps(self._epoch * self.steps() + batch + 1)

    @abstractmethod
    def after_steps(self, completed: int) -> None:
        """Set the rate, if it is this callback's turn after so many steps."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        rates = [keras_state.number(one.learning_rate) for one in _rated(self.model.optimizer)]
        if logs is not None and len(rates) == 1:
            logs["learning_rate"] = rates[0]


def _rated(optimizer: Any) -> list[Any]:
    """The optimizers that have a learning rate: those inside a MultiOptimizer, else the optimizer itself."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


class Warmup(_Rate):
    """Gradual warmup from the base learning rate to the scaled one, step by step (step 3).

    After k completed steps the rate is the scaled one times ``warmup_multiplier(k, ...)``; ``fit`` logs it as
    ``learning_rate``. With 8 workers, base 0.01 and 3 epochs the epochs end with 0.0333, 0.0567 and 0.0800. When the
    warmup is over, the rate is left to other callbacks.

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
        self._factor = learning_rate.scale_factor(world.size, rule)
        self._epochs = epochs
        self._after = after
        learning_rate.warmup_steps(epochs, steps_per_epoch if steps_per_epoch is not None else 1)

    def after_steps(self, completed: int) -> None:
        """Set the rate while the warmup lasts, at its end, and beyond it only by ``after``."""
        length = learning_rate.warmup_steps(self._epochs, self.steps())
        if self._after is not None and completed >= length:
            self._sync_and_multiply(self._after(completed - length))
        elif completed <= length:
            self._sync_and_multiply(learning_rate.warmup_multiplier(completed, length, self._factor))

    def _sync_and_multiply(self, multiplier: float) -> None:
        _ = self.model  # on jax this brings the variables up to date
        self.multiply(multiplier)


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
        """Called by Keras."""
        if self._staircase:
            self._apply(epoch)
        else:
            super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if not self._staircase:
            super().on_train_batch_end(batch, logs)

    def after_steps(self, completed: int) -> None:
        """Set the rate of a smooth schedule."""
        self._apply(completed / self.steps())

    def _apply(self, epoch: float) -> None:
        if epoch < self._start or (self._end is not None and epoch >= self._end):
            return
        _ = self.model  # on jax this brings the variables up to date
        self.multiply(self._multiplier(epoch) if callable(self._multiplier) else self._multiplier)


class BroadcastState(_Callback):
    """Gives every rank the root's weights and optimizer state before the first step (step 5).

    Args:
        root: rank to copy from.
    Raises:
        InvalidArgumentError: (from ``fit``) the model is not built; TensorFlow builds it in the first step only.
        AgreementError: (from ``fit``) the ranks' models differ in layers, shapes or types.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self._root = root

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        broadcast_state(self.model, self.model.optimizer, self._root)


def broadcast_state(model: Any, optimizer: Any | None, root: int) -> None:
    """The inside of ``hvdkit.keras.broadcast_state``."""
    world = keras_state.world()
    if not 0 <= root < world.size:
        raise InvalidArgumentError(f"root must be a rank in 0 .. {world.size - 1}, got {root}.")
    variables = keras_state.model_variables(model)
    if optimizer is not None:
        variables += keras_state.optimizer_variables(optimizer, model)
    if world.size > 1:
        keras_state.require_same_layout(variables)
        keras_state.broadcast(variables, root)


class AverageMetrics(_Callback):
    """Makes the logs of every epoch, validation included, those of all ranks together, the same on each rank.

    The states of Keras' own metrics are added up, as if one process had seen all samples; other metrics and logs are
    weighted by each rank's number of samples. What follows in the list, the history and the progress line see the
    result. To validate on every sample exactly once, give each rank its part: ``x[world.rank::world.size]``.

    Args:
        world: the job.
    """

    def __init__(self, world: Topology) -> None:
        super().__init__()
        self._world = world
        self._in_fit = False
        self._training: _States | None = None

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self._in_fit = True

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self._in_fit = False

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras before a validation, which starts the metrics anew."""
        if self._in_fit and self._world.size > 1:
            self._training = _States(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if logs is None or self._world.size == 1:
            return
        latest, before_validation, self._training = _States(self.model), self._training, None
        phases = [("", before_validation), ("val_", latest)] if before_validation is not None else [("", latest)]
        keras_state.require_same_names(logs)
        weighted: dict[str, tuple[float, float]] = {}
        for prefix, states in phases:
            names = [name for name in logs if name.startswith("val_") == bool(prefix)]
            results = {prefix + name: value for name, value in states.summed_results().items()}
            # As in Keras: a train_step of the user's own may return what no metric knows.
            known = states.samples > 0 and results.keys() <= set(names)
            weight = states.samples or 1.0
            for name in names:
                value = results.get(name, logs[name]) if known else logs[name]
                if np.ndim(value) == 0:
                    weighted[name] = (float(value) * weight, weight)
                else:
                    logs[name] = value
        latest.assign(latest.values)
        logs.update(keras_state.average(weighted, self._world.size))


class _States:
    """The states of a model's metrics at one moment, and the number of samples that they have seen."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._variables = [variable for metric in model.metrics for variable in metric.variables]
        own = {id(variable) for metric in model.metrics for variable in _additive(metric)}
        self._is_additive = [id(variable) in own for variable in self._variables]
        self.values = keras_state.values_of(self._variables)
        trackers = [metric for metric in model.metrics if metric.name == "loss" and hasattr(metric, "count")]
        self.samples = keras_state.number(trackers[0].count) if trackers else 0.0

    def assign(self, values: Iterable[npt.NDArray[Any]]) -> None:
        """Put values into the model's metrics."""
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def summed_results(self) -> dict[str, Any]:
        """The metrics' results of the states summed over the ranks, by name; a collective. Leaves those states."""
        flat = [np.zeros(0), *(value.reshape(-1).astype(np.float64) for value in self.values)]
        total = TRANSPORT.sum(np.concatenate(flat), "hvdkit.metric_states")
        parts = np.split(total, np.cumsum([value.size for value in self.values])[:-1]) if self.values else []
        self.assign(
            part.reshape(mine.shape).astype(mine.dtype) if additive else mine
            for mine, part, additive in zip(self.values, parts, self._is_additive, strict=True)
        )
        results = self._model.get_metrics_result()
        return {name: keras.ops.convert_to_numpy(value) for name, value in results.items()}


def _additive(metric: Any) -> list[Any]:
    """Variables whose sum over the ranks is the state of the whole: those of Keras' own metrics."""
    inside = list(getattr(metric, "metrics", []))
    if inside:
        return [variable for one in inside for variable in _additive(one)]
    return list(metric.variables) if type(metric).__module__.split(".")[0] == "keras" else []


class Checkpoint(_Callback):
    """Saves model and optimizer after each epoch, on the root, and resumes where the newest checkpoint ended (step 6).

    ``fit`` goes on at the right epoch by itself, as with ``keras.callbacks.BackupAndRestore``; ``epochs`` stays the
    number of the last one. An error is raised on every rank.

    Args:
        directory: where the checkpoints live, see ``Checkpoints``.
        keep: how many of the newest stay.
        resume: False: start anew whatever is there.
    Attributes:
        initial_epoch: where the last ``fit`` began.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3, resume: bool = True) -> None:
        super().__init__()
        self._store = CheckpointDirectory(directory, keep)
        self._resume = resume
        self.initial_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        saved = restore(self._store, self.model, self.model.optimizer) if self._resume else None
        self.initial_epoch = int(saved.metadata.get("epoch", 0)) if saved is not None else 0
        self.model._initial_epoch = self.initial_epoch or None  # Keras' door for callbacks that resume

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self.model._initial_epoch = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        optimizer = self.model.optimizer
        save(self._store, self.model, optimizer, int(keras_state.number(optimizer.iterations)), {"epoch": epoch + 1})


def save(store: CheckpointDirectory, model: Any, optimizer: Any | None, step: int, metadata: dict[str, Any]) -> Saved:
    """The inside of ``hvdkit.keras.Checkpoints.save``; a collective."""

    def write(directory: Path) -> None:
        keras_state.write_model(directory / "model.weights.h5", model)
        if optimizer is not None:
            keras_state.write_optimizer(directory / "optimizer.npz", optimizer, model)

    facts = {"framework": "keras", "keras": keras.__version__, "backend": keras.backend.backend()}
    everything = {**facts, "size": keras_state.world().size, **metadata}
    return cast(Saved, keras_state.on_root(lambda: store.save(step, write, everything)))


def restore(store: CheckpointDirectory, model: Any, optimizer: Any | None) -> Saved | None:
    """The inside of ``hvdkit.keras.Checkpoints.restore``; a collective."""

    def load() -> Saved | None:
        saved = store.latest()
        if saved is None:
            return None
        slots = keras_state.read_optimizer(saved.path / "optimizer.npz", optimizer, model) if optimizer else []
        keras_state.read_model(saved.path / "model.weights.h5", model)
        for variable, value in slots:
            variable.assign(value)
        return saved

    saved = cast("Saved | None", keras_state.on_root(load))
    if saved is not None:
        broadcast_state(model, optimizer, 0)
    return saved
