"""The gradients of a user's model and the order in which a backward makes them, found in a process of its own.

``python -m hvdkit.measure.emulate.model_sizes QUESTION REPLY``: QUESTION is JSON (see ``plan.of_model``), REPLY the
file to write. Frameworks are imported here and nowhere else in the room, after the user's module imported its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model_factory import TAKEN, Made, framework_of, make, reply, torch_forward, torch_loss, user_code

OBSERVED = "in the order in which a backward produced them"
NO_INPUTS = (
    "in the reverse order of {parameters}, since no input is known (give --input-shape, or return (model, inputs), for "
    "the order of a real backward)"
)
JAX = "in the reverse order of model.trainable_variables: JAX gives all gradients at once"
_GATHERING = ("AddN", "ConcatV2", "Concat")
"""TensorFlow's operations that put the parts of a gradient together, at the end of a backward."""
_BATCH = 2


@dataclass(frozen=True)
class ModelGradient:
    """One parameter's gradient.

    Attributes:
        name: of the parameter.
        layer: of the module that holds it.
        elements: how many numbers.
        dtype: their type, as NumPy names it.
    """

    name: str
    layer: str
    elements: int
    dtype: str


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The gradients of a model.

    Returns:
        framework, order (in words), and gradients: a list of name, elements and dtype.
    Raises:
        InvalidArgumentError: the factory cannot be found, fails, or gives no model of the framework.
    """
    made = make(question["module"], question["factory"], question["input_shape"])
    framework = framework_of(made.model, question["framework"])
    gradients_of = {"torch": of_torch, "keras": of_keras, "tensorflow": of_tensorflow}[framework]
    gradients, order = gradients_of(made)
    found = [one for one in gradients if one.elements > 0]
    if not found:
        raise InvalidArgumentError(
            "the model has no parameter that is trained; expected at least one (a model that makes them in its first "
            "call needs --input-shape, or a factory that returns (model, inputs))."
        )
    if question["per"] == "layer":
        found = by_layer(found)
    listed = [{"name": one.name, "elements": one.elements, "dtype": one.dtype} for one in found]
    return {"framework": framework, "order": order, "gradients": listed}


def by_layer(gradients: Sequence[ModelGradient]) -> list[ModelGradient]:
    """One for each layer, ready when the last of its gradients is.

    A layer whose gradients have several types gives one for each type: a collective has one type.
    """
    groups: dict[tuple[str, str], list[ModelGradient]] = {}
    for one in gradients:
        key = (one.layer, one.dtype)
        groups[key] = [*groups.pop(key, []), one]
    layers = [layer for layer, _ in groups]
    found = []
    for (layer, dtype), group in groups.items():
        name = layer if layers.count(layer) == 1 else f"{layer} ({dtype})"
        found.append(ModelGradient(name, layer, sum(one.elements for one in group), dtype))
    return found


def _ordered(ready: Sequence[int], count: int) -> tuple[list[int], str]:
    """Indices of ``count`` gradients, those that became ``ready`` in that order, the others last; and what to say."""
    order = list(dict.fromkeys(ready))
    missing = [index for index in range(count) if index not in set(order)]
    return [*order, *missing], OBSERVED + (f"; {len(missing)} without a gradient in it come last" if missing else "")


# PyTorch


def of_torch(made: Made) -> tuple[list[ModelGradient], str]:
    """The gradients of the parameters that are trained, in the order in which they are ready, and how that was found.

    With inputs: the order of one backward (``torch_order``). Parameters that get no gradient come last, as Horovod
    reduces those when the optimizer's step begins. Without inputs: the reverse of ``model.parameters()``.

    Raises:
        InvalidArgumentError: the forward or the backward fails, or the shapes are not known without inputs.
    """
    from torch.nn.parameter import is_lazy

    known = made.inputs is not None or made.input_shape is not None
    loss = _torch_loss(made, lambda: torch_forward(made)) if known else None
    # after the forward, which makes lazy parameters
    trained = [(name, parameter) for name, parameter in made.model.named_parameters() if parameter.requires_grad]
    lazy = [name for name, parameter in trained if is_lazy(parameter)]
    if lazy:
        raise InvalidArgumentError(
            f"the shape of {lazy[0]!r} is not known before the model has seen an input; give --input-shape, or return "
            "(model, inputs)."
        )
    order, words = list(range(len(trained)))[::-1], NO_INPUTS.format(parameters="model.parameters()")
    if known:
        order, words = torch_order([parameter for _, parameter in trained], loss)
    gradients = [
        ModelGradient(
            name, name.rpartition(".")[0] or "model", parameter.numel(), str(parameter.dtype).removeprefix("torch.")
        )
        for name, parameter in trained
    ]
    return [gradients[index] for index in order], words


def _torch_loss(made: Made, forward: Callable[[], Any]) -> Any:
    import torch

    with user_code("the model's forward", TAKEN), torch.enable_grad():
        return torch_loss(made, forward())


def torch_order(parameters: Sequence[Any], loss: Any) -> tuple[list[int], str]:
    """Indices of PyTorch's parameters in the order in which one backward accumulates their gradients, and in words how.

    That is when Horovod's optimizer announces them. Old gradients are dropped.

    Raises:
        InvalidArgumentError: the backward fails.
    Source: torch.Tensor.register_post_accumulate_grad_hook (PyTorch 2.1).
    """
    ready: list[int] = []
    hooks = []
    for index, parameter in enumerate(parameters):
        parameter.grad = None
        hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, index=index: ready.append(index)))
    expected = "a loss that depends on parameters (return (model, inputs, loss function))."
    try:
        with user_code("the model's backward", expected):
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return _ordered(ready, len(parameters))


# Keras


def of_keras(made: Made) -> tuple[list[ModelGradient], str]:
    """The gradients of the variables that are trained, in the order in which they are ready, and how that was found.

    With inputs, or where the model has ``keras.Input`` of known shapes: the order of one backward, as TensorFlow traces
    it or as PyTorch runs it. Else, and on JAX, the reverse of ``model.trainable_variables``.

    Raises:
        InvalidArgumentError: the model is not built and no inputs are known, or it does not take them.
    """
    import keras

    if made.inputs is None and made.input_shape is None and not made.model.built:
        raise InvalidArgumentError(
            "the model is not built, so that its shapes are not known; give it an Input or --input-shape, or return "
            "(model, inputs)."
        )
    known = _with_keras_inputs(made)

    def forward() -> Any:
        inputs = known.inputs if isinstance(known.inputs, tuple | list) else (known.inputs,)
        return known.model(*inputs, training=True)  # some layers have another backward in training

    if known.inputs is not None:
        with user_code("the model's call", TAKEN):
            forward()  # which also makes variables that are made in a first call
    variables = list(made.model.trainable_variables)
    own, backend = [one.value for one in variables], keras.backend.backend()
    if known.inputs is None:
        order, words = list(range(len(own)))[::-1], NO_INPUTS.format(parameters="model.trainable_variables")
    elif backend == "tensorflow":
        order, words = tensorflow_order(own, lambda: tensorflow_loss(known, forward()))
    elif backend == "torch":
        order, words = torch_order(own, _torch_loss(known, forward))
    else:
        order, words = list(range(len(own)))[::-1], JAX
    gradients = []
    for one in variables:
        path = str(one.path)
        layer = path.rpartition("/")[0] or "model"
        gradients.append(ModelGradient(path, layer, math.prod(one.shape), str(one.dtype)))
    return [gradients[index] for index in order], words


def _with_keras_inputs(made: Made) -> Made:
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


# TensorFlow


def of_tensorflow(made: Made) -> tuple[list[ModelGradient], str]:
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

    def is_trained(one: Any) -> bool:
        return isinstance(one, tf.Variable) and one.trainable

    # tf.Module offers _flatten to its subclasses: trainable_variables is it, without the paths of attributes
    variables, gradients = [], []
    for path, variable in made.model._flatten(predicate=is_trained, with_path=True):
        name, layer, elements = "/".join(map(str, path)), "/".join(map(str, path[:-1])), variable.shape.num_elements()
        if elements is None:
            raise InvalidArgumentError(
                f"the shape of {name!r} is {variable.shape}; expected one without unknown lengths."
            )
        variables.append(variable)
        gradients.append(ModelGradient(name, layer or "model", int(elements), str(variable.dtype.name)))
    order, words = list(range(len(variables)))[::-1], NO_INPUTS.format(parameters="module.trainable_variables")
    if known.inputs is not None:
        order, words = tensorflow_order(variables, lambda: tensorflow_loss(known, known.called()))
    return [gradients[index] for index in order], words


def tensorflow_loss(made: Made, output: Any) -> Any:
    """What the backward begins with: the factory's loss, else the sum of all numbers in the output."""
    import tensorflow as tf

    if made.loss is not None:
        return made.loss(output)
    parts = [one for one in tf.nest.flatten(output) if getattr(getattr(one, "dtype", None), "is_floating", False)]
    return tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in parts])


def tensorflow_order(variables: Sequence[Any], loss: Callable[[], Any]) -> tuple[list[int], str]:
    """Indices of TensorFlow's variables in the order in which a backward makes their gradients, and in words how.

    One forward and one backward are traced into a graph, whose operations have the order in which they were made. A
    variable that is used several times is ready with the last of its parts. Where no backward can be traced the order
    is the reverse of the list, and the words say so.
    """
    import tensorflow as tf

    places: dict[int, int] = {}

    def step() -> None:
        with tf.GradientTape() as tape:
            found = loss()
        gradients = tape.gradient(found, list(variables))
        operations = tf.compat.v1.get_default_graph().get_operations()
        numbers = {operation.name: number for number, operation in enumerate(operations)}
        for index, one in enumerate(gradients):
            if one is not None:
                places[index] = _completed_by(getattr(one, "values", one).op, numbers)

    try:
        tf.function(step).get_concrete_function()
    except Exception as error:  # whatever the user's forward does in a graph
        text = " ".join(str(error).split())[:200]
        return list(range(len(variables)))[::-1], (
            f"in the reverse order of trainable_variables, since no backward could be traced ({type(error).__name__}: "
            f"{text})"
        )
    return _ordered(sorted(places, key=lambda index: (places[index], -index)), len(variables))


def _completed_by(operation: Any, numbers: Mapping[str, int]) -> int:
    """The number of the operation that makes the last part of a gradient."""
    if operation.type in _GATHERING:
        parts = [one.op for one in operation.inputs if one.op.type != "Const"]
        return max((_completed_by(one, numbers) for one in parts), default=numbers[operation.name])
    return numbers[operation.name]


if __name__ == "__main__":
    reply(answer, sys.argv[1:])
