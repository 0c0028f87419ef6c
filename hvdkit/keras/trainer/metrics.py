"""Metrics of all ranks together, after an epoch of ``fit`` and in an evaluation; an inside of ``hvdkit.keras``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.keras import private, state
from hvdkit.keras.trainer.callbacks import Callback
from hvdkit.keras.transport import TRANSPORT, Transport
from hvdkit.steps import agreement, metrics
from hvdkit.steps.topology import Topology


class AverageMetrics(Callback):
    """Makes the logs of every epoch, validation included, those of all ranks together, the same on each rank.

    The states of metrics are added up, as if one process had seen all samples. Those of a metric of your own that do
    not add up, and other logs, are averaged, weighted by each rank's number of samples. What follows in the list, the
    history and the progress line see the result. ``fit`` begins with one on several ranks; one of your own averages
    what callbacks before it add. ``fit(validation_data=shard(...))`` validates on every sample exactly once. With
    ``remainder="exact"`` a filler is not counted in training (but where steps_per_execution > 1), and the loss of an
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
        return agreement.agree(TRANSPORT, agreement.digest_table(sorted(names)), "hvdkit.metric_names")


class States:
    """The states of a model's metrics at one moment.

    Attributes:
        values: of the metrics' variables.
        samples: how many they have seen; None where Keras does not count them.
        samples_of_all: how many all ranks' have seen, once ``summed_results`` has added them up.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._metrics = list(metrics_of(model))
        self._variables = [variable for metric in self._metrics for variable in metric.variables]
        self.values = list(map(state.value_of, self._variables))
        self._trackers = [metric for metric in model.metrics if metric.name == "loss" and hasattr(metric, "count")]
        self.samples, self.samples_of_all = self._counted(), 0.0

    def _counted(self) -> float | None:
        return state.number(self._trackers[0].count) if self._trackers else None

    def assign(self, values: Iterable[npt.NDArray[Any]]) -> None:
        """Put values into the model's metrics."""
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def summed_results(self, weight: float | None = None) -> dict[str, Any]:
        """The metrics' results of the states of all ranks, by name; a collective. Leaves those states.

        Variables are added up, or combined as their ``aggregation`` says. Of a metric whose variables do not add up the
        result is the mean of the ranks' results.

        Args:
            weight: of this rank in such a mean; default: its samples.
        """
        begin = [value for metric in self._metrics for value in at_first(metric)]
        triples = zip(self._variables, self.values, begin, strict=True)
        added = [part(variable, value - first, TRANSPORT).reshape(-1) for variable, value, first in triples]
        reasons = [why_not(metric) for metric in self._metrics]
        flat = [np.array([bool(reason) for reason in reasons], np.float64), *added]
        total = TRANSPORT.allreduce(np.concatenate(flat), "hvdkit.metric_states")
        apart, *parts = np.split(total, np.cumsum([len(one) for one in flat])[:-1])
        averaged = {
            metric: reason or "on another rank it was called out of hvdkit's sight"
            for metric, reason, ranks in zip(self._metrics, reasons, apart, strict=True)
            if ranks
        }
        kept = {id(variable) for metric in averaged for variable in metric.variables}
        self.assign(
            value if id(variable) in kept else (part.reshape(value.shape) + first).astype(value.dtype)
            for variable, value, part, first in zip(self._variables, self.values, parts, begin, strict=True)
        )
        self.samples_of_all = self._counted() or 0.0
        results, whose = self._results(averaged)
        if whose:
            own = self.samples if weight is None else weight
            results.update(_means({name: results[name] for name in whose}, whose, 1.0 if own is None else own))
        return results

    def _results(self, averaged: Mapping[Any, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """The metrics' results by name, and of those that are to be averaged the reason."""
        found: list[tuple[Any, str]] = []

        def telling(result: Callable[[], Any], reason: str) -> Callable[[], Any]:
            def told() -> Any:
                value = result()
                found.extend((one, reason) for one in [value, *keras.tree.flatten(value)])
                return value

            return told

        for metric, reason in averaged.items():
            vars(metric)["result"] = telling(metric.result, reason)
        try:
            results = self._model.get_metrics_result()
        finally:
            for metric in averaged:
                del vars(metric)["result"]
        whose = {name: reason for name, value in results.items() for one, reason in found if value is one}
        return {name: keras.ops.convert_to_numpy(value) for name, value in results.items()}, whose


def _means(mine: Mapping[str, Any], whose: Mapping[str, str], weight: float) -> dict[str, Any]:
    """The means of the ranks' results, weighted by their samples; a collective. Says so where they differ."""
    values = [np.asarray(value, np.float64).reshape(-1) for value in mine.values()]
    ends = np.cumsum([value.size for value in values])[:-1]
    everyone = np.concatenate(TRANSPORT.allgather(np.concatenate([[weight], *values])[None], "hvdkit.metric_results"))
    weights, results = everyone[:, 0], everyone[:, 1:]
    if weights.any():
        weights, results = weights[weights > 0], results[weights > 0]
    else:
        weights = np.ones(len(results))
    for name, spread in zip(mine, np.split(np.ptp(results, axis=0), ends), strict=True):
        if spread.any() and TRANSPORT.rank() == 0:
            _warn_of_mean(name, whose[name])
    parts = np.split(weights @ results / weights.sum(), ends)
    return {name: part.reshape(np.shape(value)) for (name, value), part in zip(mine.items(), parts, strict=True)}


@functools.cache
def _warn_of_mean(name: str, reason: str) -> None:
    warnings.warn(
        f"the states of metric {name!r} are not added up over the ranks ({reason}): its value is the mean of the "
        "ranks' results, weighted by their samples, which need not be that of all samples. Let update_state add to "
        "variables (totals and counts) of which result() is a function, or compute it of what "
        "model.predict(hvdkit.keras.shard(...)) returns.",
        stacklevel=2,
    )


# Whether the states of a metric of the user's own can be added up, as those of Keras' metrics can --------------------
#
# Keras' rule under ``tf.distribute`` is that a metric's variables are added up. That is right for totals and counts,
# and wrong for a running maximum or average, which nothing in a metric's interface tells. So a metric is tried: its
# states after two batches must be the sum of those after each. What it was called with is kept when Keras traces it.

_CALLED_WITH: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""By metric: the types of what it was called with, and what is to be said of it."""
_BATCH = 8
"""Samples of a try where the number is not known."""


def is_own(metric: Any) -> bool:
    """Whether a metric is none of Keras' own, whose variables all add up."""
    return type(metric).__module__.split(".")[0] != "keras"


def metrics_of(model: Any) -> Iterator[Any]:
    """The metrics whose variables ``model.metrics`` has, those of ``compile`` one by one."""
    for metric in model.metrics:
        yield from metric.metrics if type(metric).__name__ == "CompileMetrics" else [metric]


def note(model: Any, *, trains: bool = False) -> None:
    """Note from now on with what the model's own metrics are called; ``trains``: before a training, not within one."""
    given = keras.tree.flatten(private.own_metrics_of(model))
    own = [one for one in [*given, *metrics_of(model)] if isinstance(one, keras.metrics.Metric)]
    for metric in own:
        if is_own(metric) and metric not in _CALLED_WITH:
            _CALLED_WITH[metric] = []
            vars(metric)["update_state"] = _with_types_kept(metric.update_state, _CALLED_WITH[metric])
            model.test_function = None  # what was traced before does not call it again
            if trains:
                model.train_function = None


def _with_types_kept(plain: Any, called_with: list[Any]) -> Any:
    @functools.wraps(plain)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        if not called_with:
            called_with.append(keras.tree.map_structure(_type_of, (args, kwargs)))
        return plain(*args, **kwargs)

    return update_state


def _type_of(value: Any) -> Any:
    if not (keras.ops.is_tensor(value) or isinstance(value, np.ndarray)):
        return value
    return keras.KerasTensor(tuple(value.shape), keras.backend.standardize_dtype(value.dtype))


def why_not(metric: Any) -> str:
    """Why the variables of a metric must not be added up; "" where they may."""
    if not is_own(metric):
        return ""
    if not metric.variables:
        return "it keeps no Keras variables"
    called_with = _CALLED_WITH.get(metric, [])
    if not called_with:
        return "it was called out of hvdkit's sight"
    if len(called_with) == 1:
        called_with.append(_tried(metric, called_with[0]))
    return str(called_with[1])


def at_first(metric: Any) -> list[Any]:
    """The values of a metric's variables before it has seen a sample."""
    states = _trial(metric).stateless_reset_state() if is_own(metric) else metric.variables
    return [state.value_of(one) * (1 if is_own(metric) else 0) for one in states]


def part(variable: Any, change: Any, ranks: Transport) -> Any:
    """What this rank adds to the change of a variable on all ranks, float64: all, or what its aggregation says."""
    share = {"mean": 1 / ranks.size(), "only_first_replica": float(ranks.rank() == 0)}
    return np.asarray(change, np.float64) * share.get(variable.aggregation, 1.0)


def _trial(metric: Any) -> Any:
    """A metric to try, whose lists and counters are its own, and whose variables keep their values."""
    trial = object.__new__(type(metric))  # copy.copy would have Keras serialize it
    for name, value in vars(metric).items():
        kinds = [kind for kind in (list, dict) if isinstance(value, kind)]
        vars(trial)[name] = kinds[0](value) if kinds else value
    vars(trial).pop("update_state", None)
    return trial


def _tried(metric: Any, given: Any) -> str:
    """Why the variables of a metric do not add up, found on random batches of the types ``given``; "" where they do."""
    trial, batches = _trial(metric), _draws(given)

    def after(states: Any, batch: Any) -> list[Any]:
        args, kwargs = batch
        return trial.stateless_update_state(states, *args, **kwargs)  # type: ignore[no-any-return]

    def changes(states: Any) -> list[Any]:
        pairs = zip(states, begin, strict=True)
        return [np.subtract(*(np.asarray(state.value_of(one), np.float64) for one in pair)) for pair in pairs]

    try:
        begin = trial.stateless_reset_state()
        first, second = next(batches), next(batches)
        both = changes(after(after(begin, first), second))
        each = zip(changes(after(begin, first)), changes(after(begin, second)), strict=True)
    except Exception as error:
        return f"it could not be tried, {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    declared = [variable.aggregation in ("mean", "only_first_replica") for variable in metric.variables]
    sums = [
        bool(np.isfinite(change).all()) and np.allclose(change, one + other, 1e-3, 1e-6)
        for change, (one, other) in zip(both, each, strict=True)
    ]
    if all(fits or known for fits, known in zip(sums, declared, strict=True)):
        return ""
    return "after two batches they are not the sum of those after each"


def _draws(given: Any) -> Iterator[Any]:
    """Batches of such types, of random numbers: labels below the number of classes, all else between 0 and 1."""
    tensors = [one for one in keras.tree.flatten(given) if isinstance(one, keras.KerasTensor)]
    outputs = [one.shape[-1] or 0 for one in tensors if len(one.shape) > 1 and one.dtype.startswith("float")]
    classes = max([2, *outputs])
    generator = np.random.default_rng(0)

    def drawn(one: Any) -> Any:
        if not isinstance(one, keras.KerasTensor):
            return one
        shape = [size or _BATCH for size in one.shape]
        is_label = "float" not in one.dtype or (classes > 2 and (len(shape) < 2 or shape[-1] == 1))
        numbers = generator.integers(0, classes, shape) if is_label else generator.random(shape)
        return keras.ops.convert_to_tensor(numbers, one.dtype)

    while True:
        yield keras.tree.map_structure(drawn, given)
