"""What a Keras model needs, from its variables and the shapes of its layers' outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.memory.terms import BYTES, STATES
from hvdkit.model_factory.making import Made

_VIEWS = ("InputLayer", "Flatten", "Reshape")


def measure(made: Made, question: Mapping[str, Any]) -> dict[str, Any]:
    """The terms at ``question["batch"]`` samples; activations are the outputs of the layers, an estimate.

    Raises:
        InvalidArgumentError: the model is not built, so that its shapes are not known.
    """
    if not made.model.built:
        raise InvalidArgumentError("the model is not built, so that its shapes are not known; give it an Input layer.")
    gradients = _bytes(made.model.trainable_variables)
    numbers = sum(math.prod(variable.shape) for variable in made.model.trainable_variables)
    return {
        "parameters": _bytes(made.model.variables),
        "gradients": gradients,
        "states": gradients * STATES[question["optimizer"]],
        "activations": sum(_outputs(layer, question["batch"]) for layer in _layers(made.model)),
        "gradient_size": gradients / numbers if numbers else 4.0,
        "peak": None,
    }


def _bytes(variables: Iterable[Any]) -> int:
    return sum(math.prod(variable.shape) * BYTES.get(str(variable.dtype), 4) for variable in variables)


def _layers(model: Any) -> Iterable[Any]:
    for layer in model.layers:
        if hasattr(layer, "layers"):
            yield from _layers(layer)
        elif type(layer).__name__ not in _VIEWS:
            yield layer


def _outputs(layer: Any, batch: int) -> int:
    try:
        output = layer.output
    except (AttributeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the output shape of layer {layer.name!r} is not known; expected a Sequential or functional model, whose "
            "layers are connected."
        ) from error
    tensors = output if isinstance(output, list | tuple) else [output]
    shapes = [[batch if length is None else length for length in tensor.shape] for tensor in tensors]
    return sum(math.prod(shape) * BYTES.get(str(layer.compute_dtype), 4) for shape in shapes)
