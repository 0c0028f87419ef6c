"""A step's forward and loss of a PyTorch model that a factory gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model_factory.making import Made


def forward(made: Made) -> Any:
    """What the model gives for its inputs, called as their kind says.

    Args:
        made: a model, with a mapping of inputs (given by name), a tuple or list (one after the other), a single one, or
            none: then zeros of ``input_shape``, of the type and where the model's first floating-point parameter is.
    """
    import torch

    if made.inputs is None:
        like = next((one for one in made.model.parameters() if one.is_floating_point()), torch.empty(0))
        return made.model(torch.zeros(tuple(made.input_shape or ()), device=like.device, dtype=like.dtype))
    if isinstance(made.inputs, Mapping):
        return made.model(**made.inputs)
    if isinstance(made.inputs, tuple | list):
        return made.model(*made.inputs)
    return made.model(made.inputs)


def loss_of(made: Made, output: Any) -> Any:
    """What the backward pass begins with, a tensor of one number.

    Args:
        made: with a loss function of the output; without one, "loss" of an output that is a mapping and has it, or
            else the sum of all numbers in the output that depend on parameters.
        output: of the model: a tensor, or mappings, tuples and lists of them.
    Raises:
        InvalidArgumentError: no tensor in the output depends on parameters.
    """
    if made.loss is not None:
        return made.loss(output)
    own = output.get("loss") if isinstance(output, Mapping) else None
    if own is not None:
        return own
    parts = [tensor.float().sum() for tensor in _tensors(output)]
    if not parts:
        raise InvalidArgumentError(
            f"the model gave a {type(output).__name__} without a tensor that depends on parameters; return "
            "(model, inputs, loss function)."
        )
    return sum(parts[1:], parts[0])


def _tensors(output: Any) -> Iterator[Any]:
    """The tensors in an output that a backward can start from."""
    import torch

    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output.abs() if output.is_complex() else output
    elif isinstance(output, Mapping):
        for one in output.values():
            yield from _tensors(one)
    elif isinstance(output, tuple | list):
        for one in output:
            yield from _tensors(one)
