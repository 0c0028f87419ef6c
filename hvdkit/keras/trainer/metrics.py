"""Metrics of all ranks together, after an epoch of ``fit`` and in an evaluation; an inside of ``hvdkit.keras``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.errors import InvalidArgumentError
from hvdkit.keras import state
from hvdkit.keras.data import as_arrays
from hvdkit.keras.trainer.callbacks import Callback
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps import agreement, metrics
from hvdkit.steps.numbers import whole
from hvdkit.steps.topology import Topology


class AverageMetrics(Callback):
    """Makes the logs of every epoch, validation included, those of all ranks together, the same on each rank.

    The states of Keras' own metrics are added up, as if one process had seen all samples; other metrics and logs are
    weighted by each rank's number of samples. What follows in the list, the history and the progress line see the
    result. ``fit`` begins with one on several ranks; one of your own averages what callbacks before it add. To validate
    on every sample exactly once, give each rank its part: ``x[world.rank::world.size]``, or call ``evaluate`` after
    training. With ``remainder="exact"`` a filler is not counted (but where steps_per_execution > 1), and the loss of an
    uneven last step counts by its weights twice: as in the gradient, and by samples.

    Args:
        world: the job.
    """

    def __init__(self, world: Topology) -> None:
        super().__init__()
        self._world = world
        self._in_fit = False
        self._training: States | None = None

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self._in_fit = True

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        self._in_fit = False

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras before a validation, which starts the metrics anew."""
        if self._in_fit and self._world.size > 1:
            self._training = States(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
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


def evaluate(model: Any, dataset: Any, world: Topology, batch_size: int) -> dict[str, Any]:
    """``model.evaluate`` on all ranks together: each sample exactly once, the same result on every rank; a collective.

    Rank r takes the samples r, r + size, r + 2 * size, ... of the data set, and the states of Keras' own metrics (loss,
    accuracy, AUC, ...) are added up, as if one process had seen all samples. Other metrics are the mean of the ranks'
    results, weighted by their numbers of samples.

    Args:
        model: built and compiled, the same on all ranks.
        dataset: arrays as for ``shard``, the same on every rank; a rank may be left without a sample.
        world: the job; rank and size are used.
        batch_size: samples per step on one rank.
    Returns:
        Numbers by name, "loss" among them; an array where a metric gives one.
    Raises:
        InvalidArgumentError: not arrays, arrays of several lengths, no sample, a bad batch size, or a model that is
            not built.
        AgreementError: the ranks' metrics have different names; raised on every rank.
    """
    state.model_variables(model)
    arrays = as_arrays(dataset)
    batch_size = whole("batch_size", batch_size, 1)
    samples = keras.tree.flatten(arrays)[0].shape[0]
    if samples == 0:
        raise InvalidArgumentError("evaluate needs at least one sample, got arrays of length 0.")
    count = len(range(world.rank, samples, world.size))
    mine = slice(world.rank, None, world.size) if count else slice(1)  # a sample more, which makes the metrics
    parts = keras.tree.map_structure(lambda array: array[mine], arrays)
    named = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
    own = model.evaluate(**named, batch_size=batch_size, verbose=0, return_dict=True)
    if not count:
        model.reset_metrics()
    if world.size == 1:
        return {name: _plain(value) for name, value in own.items()}
    metrics.require_same_names(TRANSPORT, own)
    states = States(model)
    together = states.summed_results()
    states.assign(states.values)
    known = together.keys() == own.keys()  # a test_step of the user's own may return what no metric knows
    results = {name: _plain(value) for name, value in (together if known else own).items()}
    if known and states.are_additive:
        return results
    numbers = {name: value for name, value in results.items() if isinstance(value, float)}
    weighted = {name: (value * count, count) for name, value in numbers.items()}
    return {**results, **state.average(weighted, world.size)}


def _plain(value: Any) -> Any:
    """A number, or an array on the host."""
    return float(value) if np.ndim(value) == 0 else np.asarray(keras.ops.convert_to_numpy(value))


def _additive(metric: Any) -> list[Any]:
    """Variables whose sum over the ranks is the state of the whole: those of Keras' own metrics."""
    inside = list(getattr(metric, "metrics", []))
    if inside:
        return [variable for one in inside for variable in _additive(one)]
    return list(metric.variables) if type(metric).__module__.split(".")[0] == "keras" else []
