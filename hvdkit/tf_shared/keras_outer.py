"""Outer steps (``distribute(every=...)``) of a Keras 3 optimizer, eagerly and within the graphs of TensorFlow and JAX.

In a graph each step asks the host which number it has and whether there is anything to do; weights go to the host and
come back only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from hvdkit.core.communicator import Communicator
from hvdkit.steps.outer import Array, OuterLoop, OuterOptions, Weights
from hvdkit.tf_shared.keras_layers import on_host


class KerasWeights(Weights):
    """The variables that an optimizer trains, or while a graph runs their values."""

    def __init__(self, optimizer: Any, variables: Sequence[Any], names: Sequence[str]) -> None:
        self._optimizer, self._variables = optimizer, list(variables)
        shown = zip(names, self._variables, strict=True)
        self.rows = [f"{name} {keras.backend.standardize_dtype(one.dtype)} {tuple(one.shape)}" for name, one in shown]
        self.sizes = [int(np.prod(one.shape)) for one in self._variables]
        self.held: list[Array] | None = None

    def get(self, places: Sequence[int]) -> list[Array]:
        return [_wide(self._variables[place] if self.held is None else self.held[place]) for place in places]

    def put(self, places: Sequence[int], values: Sequence[Array]) -> None:
        for place, value in zip(places, values, strict=True):
            shaped = value.reshape(tuple(self._variables[place].shape))
            if self.held is None:
                self._variables[place].assign(shaped.copy())
            else:
                self.held[place] = shaped.astype(self.held[place].dtype)

    def average_slots(self, mean: Callable[[Array], Array]) -> None:
        slots = [one for one in self._optimizer.variables if keras.backend.is_float_dtype(one.dtype)]
        flat = mean(np.concatenate([_wide(slot).reshape(-1) for slot in slots]))
        ends = np.cumsum([int(np.prod(slot.shape)) for slot in slots])
        for slot, value in zip(slots, np.split(flat, ends[:-1]), strict=True):
            slot.assign(value.reshape(tuple(slot.shape)))


def _wide(value: Any) -> Array:
    array: Array = np.array(on_host(value))
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)


class KerasOuterLoop:
    """Takes the outer steps around what an optimizer applies.

    Args:
        options: where the optimizer accumulates gradients by itself, of the calls that change weights.
        optimizer: a Keras 3 optimizer.
        ranks: all of the job.
        names_of: names of variables that are equal on all ranks.
    """

    def __init__(
        self,
        options: OuterOptions,
        optimizer: Any,
        ranks: Communicator,
        names_of: Callable[[Sequence[Any]], Sequence[str]],
    ) -> None:
        passes = getattr(optimizer, "gradient_accumulation_steps", None) or 1
        counted = replace(options, every=options.every * passes, overlap=options.overlap * passes)
        self._steps, self._names_of = OuterLoop(counted, ranks), names_of

    def _begin(self, optimizer: Any, variables: Sequence[Any], held: Sequence[Any] | None = None) -> None:
        weights = KerasWeights(optimizer, variables, self._names_of(variables))
        weights.held = None if held is None else list(held)
        self._steps.begin(weights)
        weights.held = None

    def around(self, optimizer: Any, variables: Sequence[Any], apply: Callable[[], Any]) -> Any:
        """``apply()``, which changes the variables, with the outer step that is due then."""
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            if not tf.executing_eagerly():
                return self._in_graph(tf, optimizer, variables, apply)
        number, due = self._steps.tick()
        if self._steps.weights is None:
            self._begin(optimizer, variables)
        result = apply()
        if due:
            self._steps.take(number)
        return result

    def _asked(self, _: Any = None) -> Array:
        """What a step of a graph is to do: begin, take an outer step, and its number, int32 (3,)."""
        number, due = self._steps.tick()
        return np.array([self._steps.weights is None, due, number], np.int32)

    def _taken(self, number: Any, *values: Any) -> list[Array]:
        weights = self._steps.weights
        weights.held = list(map(np.asarray, values))
        try:
            self._steps.take(int(number))
            return list(weights.held)
        finally:
            weights.held = None

    def _in_graph(self, tf: Any, optimizer: Any, variables: Sequence[Any], apply: Callable[[], Any]) -> Any:
        """TensorFlow orders what reads and writes the same variables."""

        def values() -> list[Any]:
            return [keras.ops.convert_to_tensor(one) for one in variables]

        def begin() -> Any:
            def begin_with(*held: Any) -> Any:
                self._begin(optimizer, variables, held)
                return np.int32(0)

            return tf.numpy_function(begin_with, values(), tf.int32)

        def take() -> Any:
            found = tf.numpy_function(self._taken, [asked[2], *values()], [one.dtype for one in values()])
            for variable, value in zip(variables, found, strict=True):
                variable.assign(tf.ensure_shape(value, variable.shape))
            return tf.constant(0)

        # What it is given has it wait for the step before it.
        asked = tf.ensure_shape(tf.numpy_function(self._asked, [optimizer.iterations.value], tf.int32), [3])
        tf.cond(asked[0] > 0, begin, lambda: tf.constant(0))
        result = apply()
        tf.cond(asked[1] > 0, take, lambda: tf.constant(0))
        return result

    def around_stateless(self, optimizer: Any, values: Sequence[Any], apply: Callable[[], Any]) -> Any:
        """As ``around``, of a function without side effects, for JAX."""
        import jax
        import jax.numpy as jnp
        from jax.experimental import io_callback

        variables = list(optimizer._trainable_variables)
        number = jax.ShapeDtypeStruct((), jnp.int32)

        def begin(*held: Any) -> Any:
            self._begin(optimizer, variables, list(map(np.asarray, held)))
            return np.int32(0)

        asked = io_callback(self._asked, jax.ShapeDtypeStruct((3,), jnp.int32), ordered=True)
        jax.lax.cond(
            asked[0] > 0,
            lambda held: io_callback(begin, number, *held, ordered=True),
            lambda _: jnp.int32(0),
            list(values),
        )
        trained, *rest = apply()
        shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in trained]
        trained = jax.lax.cond(
            asked[1] > 0,
            lambda held: io_callback(self._taken, shapes, asked[2], *held, ordered=True),
            list,
            list(trained),
        )
        return trained, *rest
