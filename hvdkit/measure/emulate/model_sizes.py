"""The gradients of a user's model and the order in which a backward makes them, found in a process of its own.

``python -m hvdkit.measure.emulate.model_sizes QUESTION REPLY``: QUESTION is JSON (see ``plan.of_model``), REPLY the
file to write. Frameworks are imported here and nowhere else in the room, after the user's module imported its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model_factory import TAKEN, Made, framework_of, make, reply, user_code

OBSERVED = "in the order in which a backward produced them"
NO_INPUTS = (
    "in the reverse order of model.parameters(), since no input is known (give --input-shape, or return (model, "
    "inputs), for the order of a real backward)"
)
KERAS = "in the reverse order of model.trainable_variables: Keras hands over all gradients of a step together"


class ModelGradient(NamedTuple):
    """One parameter's gradient: its name, the layer that holds it, how many numbers it has, and their type in words."""

    name: str
    layer: str
    elements: int
    dtype: str


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The gradients of a model.

    Returns:
        framework, order (in words), and gradients: a list of name, elements and dtype.
    Raises:
        InvalidArgumentError: the factory cannot be found, fails, or gives no model.
    """
    made = make(question["module"], question["factory"], question["input_shape"])
    framework = framework_of(made.model)
    gradients, order = of_torch(made) if framework == "torch" else (of_keras(made), KERAS)
    gradients = [gradient for gradient in gradients if gradient.elements > 0]
    if not gradients:
        raise InvalidArgumentError(
            "the model has no parameter that is trained; expected at least one (a model that makes them in its first "
            "call needs --input-shape, or a factory that returns (model, inputs))."
        )
    if question["per"] == "layer":
        gradients = by_layer(gradients)
    listed = [{"name": one.name, "elements": one.elements, "dtype": one.dtype} for one in gradients]
    return {"framework": framework, "order": order, "gradients": listed}


def by_layer(gradients: Sequence[ModelGradient]) -> list[ModelGradient]:
    """One for each layer, ready when the last of its gradients is.

    A layer whose gradients have several types gives one for each type: a collective has one type.
    """
    sums: dict[tuple[str, str], int] = {}
    for _, layer, elements, dtype in gradients:
        sums[layer, dtype] = elements + sums.pop((layer, dtype), 0)  # to the end: it is not ready before
    layers = [layer for layer, _ in sums]
    return [
        ModelGradient(layer if layers.count(layer) == 1 else f"{layer} ({dtype})", layer, elements, dtype)
        for (layer, dtype), elements in sums.items()
    ]


def of_torch(made: Made) -> tuple[list[ModelGradient], str]:
    """The gradients of the parameters that are trained, in the order in which they are ready, and how that was found.

    With inputs: the order in which one backward accumulates them, which is when Horovod's optimizer announces them.
    Parameters that get no gradient come last, as Horovod reduces those when the optimizer's step begins. Without
    inputs: the reverse of ``model.parameters()``.

    Raises:
        InvalidArgumentError: the forward or the backward fails, or the shapes are not known without inputs.
    Source: torch.Tensor.register_post_accumulate_grad_hook (PyTorch 2.1).
    """
    import torch
    from torch.nn.parameter import is_lazy

    loss = None
    if made.inputs is not None:
        with user_code("the model's forward", TAKEN), torch.enable_grad():
            loss = made.torch_loss()
    # after the forward, which makes lazy parameters
    trained = [(name, parameter) for name, parameter in made.model.named_parameters() if parameter.requires_grad]
    lazy = [name for name, parameter in trained if is_lazy(parameter)]
    if lazy:
        raise InvalidArgumentError(
            f"the shape of {lazy[0]!r} is not known before the model has seen an input; give --input-shape, or "
            "return (model, inputs)."
        )
    gradients = [
        ModelGradient(
            name, name.rpartition(".")[0] or "model", parameter.numel(), str(parameter.dtype).removeprefix("torch.")
        )
        for name, parameter in trained
    ]
    if loss is None:
        return gradients[::-1], NO_INPUTS
    ready: list[int] = []
    for index, (_, parameter) in enumerate(trained):
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: ready.append(index))
    with user_code(
        "the model's backward", "a loss that depends on parameters (return (model, inputs, loss function))."
    ):
        loss.backward()
    order = list(dict.fromkeys(ready))
    missing = [index for index in range(len(trained)) if index not in set(order)]
    words = OBSERVED + (f"; {len(missing)} without a gradient in it come last" if missing else "")
    return [gradients[index] for index in (*order, *missing)], words


def of_keras(made: Made) -> list[ModelGradient]:
    """The gradients of the variables that are trained, the last one first.

    Raises:
        InvalidArgumentError: the model is not built and no inputs are known, or it does not take them.
    """
    if made.inputs is not None:
        with user_code("the model's call", TAKEN):
            made.called()  # which makes variables that are made in a first call
    if not made.model.built:
        raise InvalidArgumentError(
            "the model is not built, so that its shapes are not known; give it an Input or --input-shape, or return "
            "(model, inputs)."
        )
    found = []
    for variable in reversed(made.model.trainable_variables):
        path = str(variable.path)
        layer = path.rpartition("/")[0] or "model"
        found.append(ModelGradient(path, layer, math.prod(variable.shape), str(variable.dtype)))
    return found


if __name__ == "__main__":
    reply(answer, sys.argv[1:])
