"""The weights of ``remainder="exact"`` in the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdkit.errors import InvalidArgumentError
from hvdkit.tensorflow import private

_MEANS = ("sum_over_batch_size", "mean")


def weighted_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that takes the weights of ``shard(..., remainder="exact")``: ``weighted(y, output, w)``.

    Works eagerly and inside ``tf.function``.

    Args:
        loss: a loss of Keras (``keras.losses.SparseCategoricalCrossentropy()``), or a function of (target, output), as
            in Keras, that returns one loss for each sample, (m,) or (m, ...).
    Returns:
        A function of (target, output, weights=None): the mean over samples of weight * loss, where a sample's loss is
        the mean of its elements; the plain mean without weights.
    Raises:
        InvalidArgumentError: a reduction other than "sum_over_batch_size", "mean" and None, or ``ignore_class`` under a
            mean, which makes it a mean over something else than samples; when called: an output with a mask (the
            same), weights of another length, or a loss that is a single number.
    """
    name = getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)
    if not callable(loss):
        raise InvalidArgumentError(
            f"loss must be a loss of Keras or a function of (target, output), got {loss!r}; for a name use "
            "keras.losses.get(name)."
        )
    reduction = getattr(loss, "reduction", None)
    if reduction not in (*_MEANS, "none", None):
        raise InvalidArgumentError(
            f"weighted_loss needs a loss with reduction='sum_over_batch_size' or None, got {reduction!r} ({name}); "
            "only means over samples are the same for every number of ranks."
        )
    is_mean = reduction in _MEANS
    ignored = getattr(loss, "ignore_class", None)
    if is_mean and ignored is not None:
        raise InvalidArgumentError(
            f"{name} with ignore_class={ignored} divides by the other targets of the batch, not by its samples; make "
            "it with reduction=None to divide by the samples."
        )
    each = _without_reduction(loss) if is_mean else loss

    def weighted(target: Any, output: Any, weights: Any = None) -> Any:
        if is_mean and private.has_mask(output):
            raise InvalidArgumentError(
                f"the output has a mask (of Masking, or of Embedding with mask_zero): {name} then divides by what the "
                "mask leaves of the batch, not by its samples; make it with reduction=None to divide by the samples."
            )
        losses = tf.convert_to_tensor(each(target, output))
        if losses.shape.rank == 0:
            raise InvalidArgumentError(
                f"weighted_loss needs one loss for each sample, got a single number from {name}."
            )
        if losses.shape.rank != 1:
            losses = tf.reduce_mean(tf.reshape(losses, [tf.shape(losses)[0], -1]), axis=1)
        if weights is None:
            return tf.reduce_mean(losses)
        weights = tf.convert_to_tensor(weights)
        if not weights.shape.is_compatible_with(losses.shape):
            raise InvalidArgumentError(
                f"weights must be one for each sample, got {tuple(weights.shape)} for {tuple(losses.shape)}."
            )
        return tf.reduce_mean(losses * tf.cast(weights, losses.dtype))

    return weighted


def _without_reduction(loss: Any) -> Any:
    """The same loss with one number for each sample. Python's ``copy`` would serialize it and make it anew."""
    each = object.__new__(type(loss))
    each.__dict__.update(loss.__dict__)
    each.reduction = None
    return each
