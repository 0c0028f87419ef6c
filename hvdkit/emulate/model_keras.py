"""The gradients of a Keras 3 model, on any of its backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.emulate.model_process import Gradient
from hvdkit.errors import InvalidArgumentError
from hvdkit.model_factory.making import Made

ORDER = "in the reverse order of model.trainable_variables, last layer first"


def gradients(made: Made) -> tuple[list[Gradient], str]:
    """The gradients of the variables that are trained, last layer first, and how that order was found.

    Keras gives all gradients of a step at once, so that there is no order to observe; backward computes them from the
    last layer to the first.

    Raises:
        InvalidArgumentError: the model is not built and no inputs are known, or it does not take them.
    """
    _build(made)
    found = [_gradient(variable) for variable in made.model.trainable_variables]
    return found[::-1], ORDER


def _build(made: Made) -> None:
    if made.inputs is None and made.input_shape is None:
        if not made.model.built:
            raise InvalidArgumentError(
                "the model is not built, so that its shapes are not known; give it an Input or --input-shape, or "
                "return (model, inputs)."
            )
        return
    import keras

    inputs = keras.ops.zeros(tuple(made.input_shape or ())) if made.inputs is None else made.inputs
    try:
        if isinstance(inputs, Mapping) or not isinstance(inputs, tuple | list):
            made.model(inputs)
        else:
            made.model(*inputs)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise InvalidArgumentError(
            f"the model's call failed with {type(error).__name__}: {text}; expected inputs that it takes "
            "(--input-shape is with the batch, such as 2,784)."
        ) from error


def _gradient(variable: Any) -> Gradient:
    path = str(variable.path)
    elements = 1
    for length in variable.shape:
        elements *= int(length)
    return Gradient(path, path.rpartition("/")[0] or "model", elements, str(variable.dtype))
