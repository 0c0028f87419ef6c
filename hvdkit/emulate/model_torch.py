"""The gradients of a PyTorch model, in the order of a real backward where inputs are known."""

from __future__ import annotations

from typing import Any

from hvdkit.emulate.model_process import Gradient
from hvdkit.errors import InvalidArgumentError
from hvdkit.model_factory.making import Made
from hvdkit.model_factory.torch_step import forward, loss_of

NO_INPUTS = (
    "in the reverse order of model.parameters(), since no input is known (give --input-shape, or return (model, "
    "inputs), for the order of a real backward)"
)


def gradients(made: Made) -> tuple[list[Gradient], str]:
    """The gradients of the parameters that are trained, in the order in which they are ready, and how that was found.

    With inputs: one forward, then one backward from the loss (or, without one, from the sum of all outputs), and a hook
    on each parameter that notes when its gradient has been accumulated, which is when Horovod's optimizer announces it.
    Parameters that get no gradient come last, as Horovod reduces those when the optimizer's step begins. Without
    inputs: the reverse of ``model.parameters()``.

    Raises:
        InvalidArgumentError: the forward or the backward fails, or the shapes are not known without inputs.
    Source: torch.Tensor.register_post_accumulate_grad_hook (PyTorch 2.1).
    """
    if made.inputs is None and made.input_shape is None:
        names, order = [name for name, _ in _trained(made.model)][::-1], NO_INPUTS
    else:
        names, order = _order(made)
    parameters = dict(_trained(made.model))
    return [_gradient(name, parameters[name]) for name in names], order


def _trained(model: Any) -> list[tuple[str, Any]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _gradient(name: str, parameter: Any) -> Gradient:
    from torch.nn.parameter import is_lazy

    if is_lazy(parameter):
        raise InvalidArgumentError(
            f"the shape of {name!r} is not known before the model has seen an input; give --input-shape, or return "
            "(model, inputs)."
        )
    layer = name.rpartition(".")[0] or "model"
    return Gradient(name, layer, parameter.numel(), str(parameter.dtype).removeprefix("torch."))


def _order(made: Made) -> tuple[list[str], str]:
    """Names of the parameters, as their gradients arrive."""
    import torch

    try:
        with torch.enable_grad():
            loss = loss_of(made, forward(made))
    except InvalidArgumentError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise InvalidArgumentError(
            f"the model's forward failed with {type(error).__name__}: {text}; expected inputs that it takes "
            "(--input-shape is with the batch, such as 2,784)."
        ) from error
    arrived: list[str] = []
    hooks = []
    for name, parameter in _trained(made.model):
        parameter.grad = None
        hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name)))
    try:
        loss.backward()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise InvalidArgumentError(
            f"the model's backward failed with {type(error).__name__}: {text}; expected a loss that depends on "
            "parameters (return (model, inputs, loss function))."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    names = list(dict.fromkeys(arrived))
    missing = [name for name, _ in _trained(made.model) if name not in set(names)]
    order = "in the order in which a backward produced them"
    if missing:
        order += f"; {len(missing)} without a gradient in it come last"
    return [*names, *missing], order
