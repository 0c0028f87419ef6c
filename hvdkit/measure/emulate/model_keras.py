"""The gradients of a Keras 3 model, on any of its backends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate.model_process import ModelGradient
from hvdkit.measure.model_factory import TAKEN, Made, user_code

REVERSED = "in the reverse order of model.trainable_variables"
NO_INPUTS = f"{REVERSED}, since no input is known (give --input-shape, or return (model, inputs))"
JAX = f"{REVERSED}: JAX gives all gradients at once"
_BATCH = 2


def gradients(made: Made) -> tuple[list[ModelGradient], str]:
    """The gradients of the variables that are trained, in the order in which they are ready, and how that was found.

    With inputs, or where the model has ``keras.Input`` of known shapes: the order of one backward, as TensorFlow traces
    it or as PyTorch runs it. Else, and on JAX, the reverse of ``model.trainable_variables``.

    Raises:
        InvalidArgumentError: the model is not built and no inputs are known, or it does not take them.
    """
    if made.inputs is None and made.input_shape is None and not made.model.built:
        raise InvalidArgumentError(
            "the model is not built, so that its shapes are not known; give it an Input or --input-shape, or return "
            "(model, inputs)."
        )
    known = _with_inputs(made)
    if known.inputs is not None:
        with user_code("the model's call", TAKEN):
            _output(known)  # which also makes variables that are made in a first call
    variables = list(made.model.trainable_variables)
    order, words = _order(known, variables)
    return [_gradient(variables[index]) for index in order], words


def _with_inputs(made: Made) -> Made:
    """The same with zeros as inputs, where their shape is known."""
    import keras

    if made.inputs is not None:
        return made
    if made.input_shape is not None:
        return replace(made, inputs=keras.ops.zeros(tuple(made.input_shape)))
    wanted = getattr(made.model, "inputs", None) or []
    shapes = [tuple(one.shape) for one in wanted]
    if not shapes or any(length is None for shape in shapes for length in shape[1:]):
        return made
    zeros = [
        keras.ops.zeros((shape[0] or _BATCH, *shape[1:]), dtype=one.dtype)
        for one, shape in zip(wanted, shapes, strict=True)
    ]
    return replace(made, inputs=zeros[0] if len(zeros) == 1 else (zeros,))


def _output(made: Made) -> Any:
    inputs = made.inputs if isinstance(made.inputs, tuple | list) else (made.inputs,)
    return made.model(*inputs, training=True)  # some layers have another backward in training


def _order(made: Made, variables: Sequence[Any]) -> tuple[list[int], str]:
    """Indices of the variables in the order of their gradients, and how it was found."""
    import keras

    backend = keras.backend.backend()
    reverse = list(range(len(variables)))[::-1]
    if made.inputs is None:
        return reverse, NO_INPUTS
    if backend == "tensorflow":
        from hvdkit.measure.emulate import model_tensorflow as tape

        return tape.backward_order([one.value for one in variables], lambda: tape.loss_of(made, _output(made)))
    if backend == "torch":
        from hvdkit.measure.emulate import model_torch

        return model_torch.arrivals([one.value for one in variables], model_torch.loss_by(made, lambda: _output(made)))
    return reverse, JAX


def _gradient(variable: Any) -> ModelGradient:
    path = str(variable.path)
    return ModelGradient(path, path.rpartition("/")[0] or "model", math.prod(variable.shape), str(variable.dtype))
