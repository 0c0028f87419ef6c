"""The gradients of a tf.Module."""

from __future__ import annotations

from typing import Any

from hvdkit.emulate.model_process import Gradient
from hvdkit.errors import InvalidArgumentError
from hvdkit.model_factory.making import Made

ORDER = "in the reverse order of module.trainable_variables"


def gradients(made: Made) -> tuple[list[Gradient], str]:
    """The gradients of the variables that are trained, in reverse order of ``trainable_variables``, and in words so.

    A GradientTape gives all gradients at once, so that there is no order to observe. TensorFlow lists variables by the
    names of their attributes, which is the order of the layers where the names are (``layer1``, ``layer2``).

    Raises:
        InvalidArgumentError: the module does not take its inputs, or variables have no known shape.
    """
    _build(made)
    owners = _owners(made.model)
    found = [_gradient(variable, owners) for variable in made.model.trainable_variables]
    return _named_apart(found)[::-1], ORDER


def _build(made: Made) -> None:
    """Call it once where inputs are known: many modules make their variables then."""
    if made.inputs is None and made.input_shape is None:
        return
    import tensorflow as tf

    inputs = tf.zeros(tuple(made.input_shape or ())) if made.inputs is None else made.inputs
    try:
        made.model(*inputs) if isinstance(inputs, tuple | list) else made.model(inputs)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise InvalidArgumentError(
            f"the module's call failed with {type(error).__name__}: {text}; expected inputs that it takes "
            "(--input-shape is with the batch, such as 2,784)."
        ) from error


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


def _gradient(variable: Any, owners: dict[int, str]) -> Gradient:
    name = str(variable.name).partition(":")[0]
    elements = variable.shape.num_elements()
    if elements is None:
        raise InvalidArgumentError(f"the shape of {name!r} is {variable.shape}; expected one without unknown lengths.")
    layer = owners.get(id(variable)) or name.rpartition("/")[0] or "model"
    full = name if "/" in name else f"{layer}/{name}"
    return Gradient(full, layer, int(elements), str(variable.dtype.name))


def _named_apart(found: list[Gradient]) -> list[Gradient]:
    """The same with different names: TensorFlow calls every variable without a name Variable."""
    seen: dict[str, int] = {}
    result = []
    for one in found:
        seen[one.name] = seen.get(one.name, 0) + 1
        name = one.name if seen[one.name] == 1 else f"{one.name}_{seen[one.name]}"
        result.append(Gradient(name, one.layer, one.elements, one.dtype))
    return result
