"""The gradients of a tf.Module; and the order of gradients in a backward of TensorFlow, read from its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate.model_process import ModelGradient
from hvdkit.measure.model_factory import TAKEN, Made, user_code

REVERSED = (
    "in the reverse order of module.trainable_variables, which is that of the names of attributes, since no input is "
    "known (give --input-shape, or return (module, inputs), for the order of a real backward)"
)
OBSERVED = "in the order in which a backward produced them"
_GATHERING = ("AddN", "ConcatV2", "Concat")
"""Operations that put the parts of a gradient together, at the end of a backward, whenever the parts were made."""


def gradients(made: Made) -> tuple[list[ModelGradient], str]:
    """The gradients of the variables that are trained, in the order in which they are ready, and how that was found.

    With inputs: the order in which one backward of a GradientTape makes them. Without: the reverse order of
    ``trainable_variables``, which TensorFlow lists by the names of their attributes.

    Raises:
        InvalidArgumentError: the module does not take its inputs, or variables have no known shape.
    """
    import tensorflow as tf

    known = made
    if made.inputs is None and made.input_shape is not None:
        known = replace(made, inputs=tf.zeros(tuple(made.input_shape)))
    if known.inputs is not None:
        with user_code("the module's call", TAKEN):
            known.called()  # many modules make their variables then
    variables = list(made.model.trainable_variables)
    order, words = list(range(len(variables)))[::-1], REVERSED
    if known.inputs is not None:
        order, words = backward_order(variables, lambda: loss_of(known, known.called()))
    owners = _owners(made.model)
    named = _named_apart([_gradient(variable, owners) for variable in variables])
    return [named[index] for index in order], words


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
    seen: Counter[str] = Counter()
    result = []
    for one in found:
        seen[one.name] += 1
        result.append(one if seen[one.name] == 1 else replace(one, name=f"{one.name}_{seen[one.name]}"))
    return result


def backward_order(variables: Sequence[Any], forward: Callable[[], Any]) -> tuple[list[int], str]:
    """Where the gradients of variables come in a backward, and in words how that was found.

    One forward and one backward are traced into a graph, whose operations have the order in which they were made. A
    variable that is used several times is ready with the last of its parts.

    Args:
        variables: TensorFlow's own, as the model lists them.
        forward: gives the loss, a tensor of one number.
    Returns:
        (indices of ``variables`` in the order of their gradients, words). Those without a gradient come last. Where no
        backward can be traced the order is the reverse of the list, and the words say so.
    """
    reverse = list(range(len(variables)))[::-1]
    try:
        places = _places(variables, forward)
    except Exception as error:  # whatever the user's forward does in a graph
        text = " ".join(str(error).split())[:200]
        return reverse, (
            f"in the reverse order of trainable_variables, since no backward could be traced ({type(error).__name__}: "
            f"{text})"
        )
    made = [index for index in reverse if places[index] is not None]
    missing = [index for index in reverse if places[index] is None]
    words = OBSERVED + (f"; {len(missing)} without a gradient in it come last" if missing else "")
    return [*sorted(made, key=lambda index: places[index] or 0), *missing], words


def loss_of(made: Made, output: Any) -> Any:
    """What the backward begins with: the factory's loss, else the sum of all numbers in the output."""
    import tensorflow as tf

    if made.loss is not None:
        return made.loss(output)
    parts = [one for one in tf.nest.flatten(output) if getattr(getattr(one, "dtype", None), "is_floating", False)]
    return tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in parts])


def _places(variables: Sequence[Any], forward: Callable[[], Any]) -> list[int | None]:
    """Of each variable the number of the operation that completes its gradient; None where it has none."""
    import tensorflow as tf

    places: list[int | None] = []

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = forward()
        gradients = tape.gradient(loss, list(variables))
        operations = tf.compat.v1.get_default_graph().get_operations()
        numbers = {operation.name: number for number, operation in enumerate(operations)}
        places[:] = [None if one is None else _place(getattr(one, "values", one).op, numbers) for one in gradients]

    tf.function(step).get_concrete_function()
    return places


def _place(operation: Any, numbers: Mapping[str, int]) -> int:
    if operation.type in _GATHERING:
        parts = [one.op for one in operation.inputs if one.op.type != "Const"]
        return max((_place(one, numbers) for one in parts), default=numbers[operation.name])
    return numbers[operation.name]
