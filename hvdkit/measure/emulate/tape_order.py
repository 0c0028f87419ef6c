"""The order in which TensorFlow's automatic differentiation makes gradients, read from the graph of a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdkit.measure.model_factory.making import Made

OBSERVED = "in the order in which a backward produced them"
_GATHERING = ("AddN", "ConcatV2", "Concat")
"""Operations that put the parts of a gradient together, at the end of a backward, whenever the parts were made."""


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
