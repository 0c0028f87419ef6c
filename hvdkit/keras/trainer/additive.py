"""Whether the states of a metric of the user's own can be added up over the ranks, as those of Keras' metrics can.

Keras' rule under ``tf.distribute`` is that a metric's variables are added up. That is right for totals and counts, and
wrong for a running maximum or average, which nothing in a metric's interface tells. So a metric is tried: its states
after two batches must be the sum of its states after each. What it was called with is kept when Keras traces it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from hvdkit.keras import state
from hvdkit.keras.transport.interface import Transport

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
    compiled = model._compile_metrics
    given = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    own = [one for one in [*keras.tree.flatten(given), *metrics_of(model)] if isinstance(one, keras.metrics.Metric)]
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
