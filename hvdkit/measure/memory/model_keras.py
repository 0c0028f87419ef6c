"""What a Keras model needs, from its variables and the shapes of its layers' outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hvdkit.common.units import ITEM_SIZES
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.memory.terms import STATES
from hvdkit.measure.model_factory import Made

_VIEWS = ("InputLayer", "Flatten", "Reshape")


def measure(made: Made, question: Mapping[str, Any]) -> dict[str, Any]:
    """The terms at ``question["batch"]`` samples; activations are the outputs of the layers, an estimate.

    Raises:
        InvalidArgumentError: the model is not built, so that its shapes are not known.
    """
    if not made.model.built and made.input_shape is not None:
        made.model.build((None, *made.input_shape[1:]))
    if not made.model.built:
        raise InvalidArgumentError(
            "the model is not built, so that its shapes are not known; give it an Input layer, or --input-shape."
        )
    gradients = _bytes(made.model.trainable_variables)
    numbers = sum(math.prod(variable.shape) for variable in made.model.trainable_variables)
    return {
        "parameters": _bytes(made.model.variables),
        "gradients": gradients,
        "states": gradients * STATES[question["optimizer"]],
        "activations": sum(times * _outputs(layer, question["batch"]) for layer, times in _layers(made.model)),
        "gradient_size": gradients / numbers if numbers else 4.0,
        "peak": None,
    }


def _bytes(variables: Iterable[Any]) -> int:
    return sum(math.prod(variable.shape) * ITEM_SIZES.get(str(variable.dtype), 4) for variable in variables)


def _layers(model: Any) -> Iterable[tuple[Any, int]]:
    """The layers in it, also those of models in it, and how often a step calls each."""
    for layer in model.layers:
        times = _calls(model, layer)
        if hasattr(layer, "layers"):
            yield from ((inner, times * inner_times) for inner, inner_times in _layers(layer))
        elif type(layer).__name__ not in _VIEWS:
            yield layer, times


def _calls(model: Any, layer: Any) -> int:
    graph = getattr(model, "_functional", None) or model  # a Sequential keeps its graph there
    depths = getattr(graph, "_nodes_by_depth", None) or {}
    return sum(node.operation is layer for nodes in depths.values() for node in nodes) or 1


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
    return sum(math.prod(shape) * ITEM_SIZES.get(str(layer.compute_dtype), 4) for shape in shapes)
