"""The gradients of a PyTorch model, in the order of a real backward where inputs are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate.model_process import ModelGradient
from hvdkit.measure.model_factory import TAKEN, Made, torch_forward, torch_loss, user_code

NO_INPUTS = (
    "in the reverse order of model.parameters(), since no input is known (give --input-shape, or return (model, "
    "inputs), for the order of a real backward)"
)
OBSERVED = "in the order in which a backward produced them"


def gradients(made: Made) -> tuple[list[ModelGradient], str]:
    """The gradients of the parameters that are trained, in the order in which they are ready, and how that was found.

    With inputs: one forward, then one backward from the loss (or, without one, from the sum of all outputs), and a hook
    on each parameter that notes when its gradient has been accumulated, which is when Horovod's optimizer announces it.
    Parameters that get no gradient come last, as Horovod reduces those when the optimizer's step begins. Without
    inputs: the reverse of ``model.parameters()``.

    Raises:
        InvalidArgumentError: the forward or the backward fails, or the shapes are not known without inputs.
    """
    if made.inputs is None and made.input_shape is None:
        return [_gradient(*one) for one in _trained(made.model)[::-1]], NO_INPUTS
    loss = loss_by(made, lambda: torch_forward(made))
    trained = _trained(made.model)  # after the forward, which makes lazy parameters
    order, words = arrivals([parameter for _, parameter in trained], loss)
    return [_gradient(*trained[index]) for index in order], words


def _trained(model: Any) -> list[tuple[str, Any]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _gradient(name: str, parameter: Any) -> ModelGradient:
    from torch.nn.parameter import is_lazy

    if is_lazy(parameter):
        raise InvalidArgumentError(
            f"the shape of {name!r} is not known before the model has seen an input; give --input-shape, or return "
            "(model, inputs)."
        )
    layer = name.rpartition(".")[0] or "model"
    return ModelGradient(name, layer, parameter.numel(), str(parameter.dtype).removeprefix("torch."))


def loss_by(made: Made, run: Callable[[], Any]) -> Any:
    """The loss of one forward.

    Args:
        made: whose loss function counts, see ``model_factory.torch_loss``.
        run: gives the model's output.
    Raises:
        InvalidArgumentError: it fails, or nothing in the output depends on parameters.
    """
    import torch

    with user_code("the model's forward", TAKEN), torch.enable_grad():
        return torch_loss(made, run())


def arrivals(parameters: Sequence[Any], loss: Any) -> tuple[list[int], str]:
    """Indices of the parameters in the order in which one backward makes their gradients, and in words how it was.

    Args:
        parameters: PyTorch's; their old gradients are dropped.
        loss: a tensor of one number.
    Raises:
        InvalidArgumentError: the backward fails.
    Source: torch.Tensor.register_post_accumulate_grad_hook (PyTorch 2.1).
    """
    arrived: list[int] = []
    hooks = []
    for index, parameter in enumerate(parameters):
        parameter.grad = None
        hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived.append(index)))
    expected = "a loss that depends on parameters (return (model, inputs, loss function))."
    try:
        with user_code("the model's backward", expected):
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    made = list(dict.fromkeys(arrived))
    missing = [index for index in range(len(parameters)) if index not in set(made)]
    words = OBSERVED + (f"; {len(missing)} without a gradient in it come last" if missing else "")
    return [*made, *missing], words
