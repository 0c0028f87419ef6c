"""The gradients of a tf.Module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate import tape_order
from hvdkit.measure.emulate.model_process import ModelGradient
from hvdkit.measure.model_factory.making import TAKEN, Made, user_code

REVERSED = (
    "in the reverse order of module.trainable_variables, which is that of the names of attributes, since no input is "
    "known (give --input-shape, or return (module, inputs), for the order of a real backward)"
)


def gradients(made: Made) -> tuple[list[ModelGradient], str]:
    """The gradients of the variables that are trained, in the order in which they are ready, and how that was found.

    With inputs: the order in which one backward of a GradientTape makes them. Without: the reverse order of
    ``trainable_variables``, which TensorFlow lists by the names of their attributes.

    Raises:
        InvalidArgumentError: the module does not take its inputs, or variables have no known shape.
    """
    known = _with_inputs(made)
    if known.inputs is not None:
        with user_code("the module's call", TAKEN):
            _output(known)  # many modules make their variables then
    variables = list(made.model.trainable_variables)
    order, words = list(range(len(variables)))[::-1], REVERSED
    if known.inputs is not None:
        order, words = tape_order.backward_order(variables, lambda: tape_order.loss_of(known, _output(known)))
    owners = _owners(made.model)
    named = _named_apart([_gradient(variable, owners) for variable in variables])
    return [named[index] for index in order], words


def _with_inputs(made: Made) -> Made:
    if made.inputs is not None or made.input_shape is None:
        return made
    import tensorflow as tf

    return replace(made, inputs=tf.zeros(tuple(made.input_shape)))


def _output(made: Made) -> Any:
    if isinstance(made.inputs, Mapping):
        return made.model(**made.inputs)
    return made.model(*made.inputs) if isinstance(made.inputs, tuple | list) else made.model(made.inputs)


def _owners(model: Any) -> dict[int, str]:
    """Variable (by identity) to the path of the module that holds it as an attribute."""
    owners: dict[int, str] = {}

    def visit(module: Any, path: str, seen: frozenset[int]) -> None:
        for name, value in sorted(vars(module).items()):
            for key, one in _members(name, value):
                if hasattr(one, "assign") and hasattr(one, "shape"):
                    owners.setdefault(id(one), path or "model")
                elif hasattr(one, "submodules") and id(one) not in seen:
                    visit(one, f"{path}/{key}" if path else key, seen | {id(one)})

    visit(model, "", frozenset({id(model)}))
    return owners


def _members(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(f"{name}{index}", one) for index, one in enumerate(value)]
    return [(name, value)]


def _gradient(variable: Any, owners: dict[int, str]) -> ModelGradient:
    name = str(variable.name).partition(":")[0]
    elements = variable.shape.num_elements()
    if elements is None:
        raise InvalidArgumentError(f"the shape of {name!r} is {variable.shape}; expected one without unknown lengths.")
    layer = owners.get(id(variable)) or name.rpartition("/")[0] or "model"
    full = name if "/" in name else f"{layer}/{name}"
    return ModelGradient(full, layer, int(elements), str(variable.dtype.name))


def _named_apart(found: list[ModelGradient]) -> list[ModelGradient]:
    """The same with different names: TensorFlow calls every variable without a name Variable."""
    seen: dict[str, int] = {}
    result = []
    for one in found:
        seen[one.name] = seen.get(one.name, 0) + 1
        name = one.name if seen[one.name] == 1 else f"{one.name}_{seen[one.name]}"
        result.append(ModelGradient(name, one.layer, one.elements, one.dtype))
    return result
