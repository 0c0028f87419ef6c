"""The weights of ``remainder="exact"`` in the loss."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hvdkit.errors import InvalidArgumentError


def weighted_loss(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss that takes the weights of ``shard(..., remainder="exact")``: ``weighted(output, target, w)``.

    Args:
        loss: a loss module of PyTorch (``nn.CrossEntropyLoss()``), a function of ``torch.nn.functional``, or a function
            of your own that returns one loss for each sample, (m,) or (m, ...).
    Returns:
        A function of (output, target, weights=None): the mean over samples of weight * loss, where a sample's loss is
        the mean of its elements; the plain mean without weights.
    Raises:
        InvalidArgumentError: a reduction other than "mean" and "none", or class weights under the reduction "mean",
            which make it a mean over something else than samples; when called: targets with ``ignore_index`` (the
            same), weights of another length, or a loss that is a single number.
    """
    reduction = getattr(loss, "reduction", "none")
    if reduction not in ("mean", "none"):
        raise InvalidArgumentError(
            f"weighted_loss needs a loss with reduction='mean' or 'none', got {reduction!r} ({type(loss).__name__}); "
            "only means are the same for every number of ranks."
        )
    ignored = getattr(loss, "ignore_index", None) if reduction == "mean" else None
    if ignored is not None and getattr(loss, "weight", None) is not None:
        raise InvalidArgumentError(
            f"{type(loss).__name__} with class weights divides by the weights of the batch, not by its samples; make "
            "it with reduction='none' to divide by the samples."
        )
    each: Any = loss
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        each = copy.copy(loss)
        each.reduction = "none"
    elif inspect.isfunction(loss) and "reduction" in inspect.signature(loss).parameters:
        each = functools.partial(loss, reduction="none")

    def weighted(output: torch.Tensor, target: Any, weights: torch.Tensor | None = None) -> torch.Tensor:
        if ignored is not None and not target.is_floating_point() and bool((target == ignored).any()):
            raise InvalidArgumentError(
                f"targets hold ignore_index={ignored}: {type(loss).__name__} then divides by the other targets of the "
                "batch, not by its samples; make it with reduction='none' to divide by the samples."
            )
        losses = each(output, target)
        if losses.dim() == 0:
            raise InvalidArgumentError("weighted_loss needs one loss for each sample, got a single number.")
        losses = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
        if weights is None:
            return losses.mean()  # type: ignore[no-any-return]
        if weights.shape != losses.shape:
            raise InvalidArgumentError(
                f"weights must be one for each sample, got {tuple(weights.shape)} for {tuple(losses.shape)}."
            )
        return (losses * weights.to(losses.device)).mean()  # type: ignore[no-any-return]

    return weighted
