"""TensorFlow's variables: what they are called, those in Keras', and those that Keras layers hold themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from hvdkit.tensorflow import private
from hvdkit.tf_shared.variable_names import plain_path


def numbered_names(variables: Iterable[Any]) -> list[str]:
    """Names for variables, each once, equal on ranks that have them in the same order."""
    return [f"{plain_path(variable)}.{place}" for place, variable in enumerate(variables)]


def native(variable: Any) -> Any:
    """The ``tf.Variable`` inside a Keras 3 variable; anything else as it is."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def beside_keras(model: Any) -> list[tf.Variable]:
    """Each ``tf.Variable`` of a Keras model that Keras 3 does not count among its weights; none that holds text.

    Args:
        model: a Keras layer or model. Looked through are its layers' attributes, lists and dicts in them, and each
            ``tf.Module`` there.
    """
    known = {id(getattr(weight, "value", None)) for weight in model.weights} | {id(weight) for weight in model.weights}
    found: dict[int, tf.Variable] = {}
    seen: set[int] = set()
    for layer in private.flat_layers(model):
        for name, value in sorted(vars(layer).items()):
            if not name.startswith("_self_"):  # what TensorFlow itself keeps there
                found.update((id(one), one) for one in _held(value, seen))
    return [one for place, one in found.items() if place not in known and one.dtype != tf.string]


def _held(thing: Any, seen: set[int]) -> Iterator[tf.Variable]:
    if isinstance(thing, (Mapping, list, tuple)) and id(thing) not in seen:
        seen.add(id(thing))
        for part in thing.values() if isinstance(thing, Mapping) else thing:
            yield from _held(part, seen)
    elif isinstance(thing, tf.Variable):
        yield thing
    elif isinstance(thing, tf.Module):
        yield from thing.variables
