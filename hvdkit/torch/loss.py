"""The weights of ``remainder="exact"`` in the loss."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from hvdkit.errors import InvalidArgumentError


def weighted_loss(loss: Callable[..., torch.Tensor], *, over: str = "samples") -> Callable[..., torch.Tensor]:
    """A loss that takes the weights of ``shard(..., remainder="exact")``: ``weighted(output, target, w)``.

    Args:
        loss: a loss module of PyTorch (``nn.CrossEntropyLoss()``), a function of ``torch.nn.functional``, or a function
            of your own that returns one loss for each sample, (m,) or (m, ...).
        over: what the mean is over. "samples": a sample's loss is the mean of its elements. "targets": every target
            counts alike, on whatever rank and in whatever sample: tokens of texts of different lengths, pixels of
            images. It divides as PyTorch's loss does on the batches of all ranks together, without targets of
            ``ignore_index`` and by class weights, and needs a loss of PyTorch with reduction="mean". Each call is then
            a collective: the same number of calls on every rank.
    Returns:
        A function of (output, target, weights=None): this rank's part of the mean; its mean over the ranks is the loss.
        Weights are (m,), also where m texts of t tokens are flattened to m * t outputs, as long as all are equal.
    Raises:
        InvalidArgumentError: a reduction other than "mean", "none" and KLDivLoss' "batchmean", or class weights under
            the reduction "mean" over samples; when called: targets with ``ignore_index`` over samples, weights of
            another length, or a loss that is a single number.
    """
    name, reduction = getattr(loss, "__name__", type(loss).__name__), getattr(loss, "reduction", "none")
    if reduction not in ("mean", "none", "batchmean"):
        raise InvalidArgumentError(
            f"weighted_loss needs a loss with reduction='mean' or 'none', got {reduction!r} ({name}); only means are "
            "the same for every number of ranks."
        )
    if over not in ("samples", "targets"):
        raise InvalidArgumentError(f"over must be 'samples' or 'targets', got {over!r}.")
    each, mean, ignored = _taken_apart(loss)
    if over == "targets":
        return _over_targets(each, mean, ignored, getattr(loss, "weight", None))
    if ignored is not None and getattr(loss, "weight", None) is not None:
        raise InvalidArgumentError(
            f"{name} with class weights divides by the weights of the batch, not by its samples; say over='targets' to "
            "divide by those of all ranks, or make it with reduction='none' to divide by the samples."
        )

    def weighted(output: torch.Tensor, target: Any, weights: torch.Tensor | None = None) -> torch.Tensor:
        if ignored is not None and not target.is_floating_point() and bool((target == ignored).any()):
            raise InvalidArgumentError(
                f"targets hold ignore_index={ignored}: {name} then divides by the other targets of the batch, not by "
                "its samples; say over='targets' to divide by those of all ranks, or make it with reduction='none' to "
                "divide by the samples."
            )
        losses = _losses(each, output, target)
        if weights is None:
            return losses.flatten(1).mean(1).mean() if losses.dim() > 1 else losses.mean()
        if weights.shape != losses.shape[:1]:
            return losses.mean() * _common(weights, losses)
        losses = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
        return (losses * weights.to(losses.device)).mean()

    return weighted


def _taken_apart(loss: Any) -> tuple[Callable[..., torch.Tensor], bool, int | None]:
    """The loss of each element; whether PyTorch takes their mean; and the class that is then left out, if any."""
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        each = copy.copy(loss)
        each.reduction = "none"  # type: ignore[assignment]
        mean = loss.reduction == "mean"
        if loss.reduction == "batchmean":  # of KLDivLoss: a sample's sum
            return lambda output, target: each(output, target).reshape(len(output), -1).sum(1), False, None
        return each, mean, getattr(loss, "ignore_index", None) if mean else None
    parameters = inspect.signature(loss).parameters if inspect.isfunction(loss) else {}
    if "reduction" not in parameters:
        return loss, False, None
    mean = parameters["reduction"].default == "mean"
    ignored = parameters["ignore_index"].default if mean and "ignore_index" in parameters else None
    return functools.partial(loss, reduction="none"), mean, ignored


def _over_targets(
    each: Callable[..., torch.Tensor], mean: bool, ignored: int | None, class_weights: torch.Tensor | None
) -> Callable[..., torch.Tensor]:
    """A loss that is this rank's sum over the mean of the ranks' counts of targets (or of class weights)."""
    if not mean:
        raise InvalidArgumentError(
            "over='targets' needs a loss of PyTorch with reduction='mean', which says what it divides by; with a loss "
            "of your own, divide the sum by average_metrics' mean of the ranks' counts."
        )

    def weighted(output: torch.Tensor, target: Any, weights: torch.Tensor | None = None) -> torch.Tensor:
        losses = _losses(each, output, target)
        with torch.inference_mode(False), torch.no_grad():
            if ignored is None or target.is_floating_point():
                count = torch.tensor(float(losses.numel()), dtype=torch.float64, device=losses.device)
            else:
                counted = target[target != ignored]
                shares = torch.ones_like(counted) if class_weights is None else class_weights[counted]
                count = shares.sum(dtype=torch.float64)
            real = 1.0 if weights is None else float(_common(weights, losses) > 0)
            over_ranks = hvd.allreduce(count * real, op=hvd.Average, name="hvdkit.targets")
        wide = torch.promote_types(losses.dtype, torch.float32)  # a sum may be more than a float16 holds
        mean: torch.Tensor = losses.sum(dtype=wide) * real / over_ranks
        return mean

    return weighted


def _losses(each: Callable[..., torch.Tensor], output: torch.Tensor, target: Any) -> torch.Tensor:
    losses = each(output, target)
    if losses.dim() == 0:
        raise InvalidArgumentError(
            "weighted_loss needs one loss for each sample, got a single number; make the loss with reduction='none'."
        )
    return losses


def _common(weights: torch.Tensor, losses: torch.Tensor) -> float:
    """The weight that all samples have, where their losses need not be one for each sample."""
    if weights.dim() != 1 or len(weights) == 0 or len(losses) % len(weights):
        raise InvalidArgumentError(
            f"weights must be one for each sample, got {tuple(weights.shape)} for {tuple(losses.shape)}."
        )
    if bool((weights != weights[0]).any()):
        raise InvalidArgumentError(
            f"weights of {len(weights)} samples for losses {tuple(losses.shape)} must be equal, as shard's are in one "
            "batch; give outputs as (m, classes, ...), or mark what does not count with ignore_index."
        )
    return float(weights[0])
