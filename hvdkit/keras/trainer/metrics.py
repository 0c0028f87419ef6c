"""Metrics of all ranks together, after an epoch of ``fit`` and in an evaluation; an inside of ``hvdkit.keras``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.keras import state
from hvdkit.keras.trainer.callbacks import Callback
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps import agreement, metrics
from hvdkit.steps.topology import Topology


class AverageMetrics(Callback):
    """Makes the logs of every epoch, validation included, those of all ranks together, the same on each rank.

    The states of Keras' own metrics are added up, as if one process had seen all samples; other metrics and logs are
    weighted by each rank's number of samples. What follows in the list, the history and the progress line see the
    result. ``fit`` begins with one on several ranks; one of your own averages what callbacks before it add. To validate
    on every sample exactly once, give each rank its part: ``x[world.rank::world.size]``, or call ``evaluate`` after
    training. With ``remainder="exact"`` a filler is not counted (but where steps_per_execution > 1), and the loss is
    weighted as in the gradient.

    Args:
        world: the job.
    """

    def __init__(self, world: Topology) -> None:
        super().__init__()
        self._world = world
        self._in_fit = False
        self._training: States | None = None

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self._in_fit = True

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self._in_fit = False

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras before a validation, which starts the metrics anew."""
        if self._in_fit and self._world.size > 1:
            self._training = States(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if logs is None or self._world.size == 1:
            return
        latest, before_validation, self._training = States(self.model), self._training, None
        phases = {"": before_validation or latest, "val_": latest if before_validation is not None else None}
        weighted: dict[str, tuple[float, float]] = {}
        for prefix, states in phases.items():
            names = [name for name in logs if name.startswith("val_") == bool(prefix)] if states is not None else []
            if not self._on_all_ranks(names) or not names or states is None:
                continue
            results = {prefix + name: value for name, value in states.summed_results().items()}
            if not states.samples_of_all:
                results.pop(f"{prefix}loss", None)  # a train_step of the user's own returns another one
            # As in Keras: it may return what no metric knows.
            known = states.samples is not None and results.keys() <= set(names)
            # Nor may it count samples; then every rank counts the same.
            weight = (states.samples or 0.0) if known and states.samples_of_all else (states.samples or 1.0)
            for name in names:
                value = results.get(name, logs[name]) if known else logs[name]
                if np.ndim(value) == 0:
                    weighted[name] = (float(value) * weight, weight)
                else:
                    logs[name] = value
        latest.assign(latest.values)
        logs.update(state.average(weighted, self._world.size))

    def _on_all_ranks(self, names: list[str]) -> bool:
        """Whether these logs can be averaged; a collective."""
        metrics.require_same_names(TRANSPORT, names)
        return True


class AverageOfFit(AverageMetrics):
    """The one that every ``fit`` on several ranks begins with: what only some ranks log, such as a validation on the
    root alone, stays theirs.
    """

    def _on_all_ranks(self, names: list[str]) -> bool:
        table = agreement.digest_table(dict.fromkeys(sorted(names), ()))
        return agreement.agree([table], lambda mine: TRANSPORT.minimum(mine, "hvdkit.metric_names"))


class States:
    """The states of a model's metrics at one moment.

    Attributes:
        values: of the metrics' variables.
        samples: how many they have seen; None where Keras does not count them.
        samples_of_all: how many all ranks' have seen, once ``summed_results`` has added them up.
        are_additive: whether all of them are Keras' own, whose states can be added up over the ranks.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._variables = [variable for metric in model.metrics for variable in metric.variables]
        own = {id(variable) for metric in model.metrics for variable in _additive(metric)}
        self._is_additive = [id(variable) in own for variable in self._variables]
        self.values = list(map(state.value_of, self._variables))
        self._trackers = [metric for metric in model.metrics if metric.name == "loss" and hasattr(metric, "count")]
        self.samples, self.samples_of_all = self._counted(), 0.0
        self.are_additive = all(self._is_additive)

    def _counted(self) -> float | None:
        return state.number(self._trackers[0].count) if self._trackers else None

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
        self.samples_of_all = self._counted() or 0.0
        results = self._model.get_metrics_result()
        return {name: keras.ops.convert_to_numpy(value) for name, value in results.items()}


def _additive(metric: Any) -> list[Any]:
    """Variables whose sum over the ranks is the state of the whole: those of Keras' own metrics."""
    inside = list(getattr(metric, "metrics", []))
    if inside:
        return [variable for one in inside for variable in _additive(one)]
    return list(metric.variables) if type(metric).__module__.split(".")[0] == "keras" else []
