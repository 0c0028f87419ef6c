"""Gradients of a loss that has one number for each sample, which TensorFlow adds up, are one warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_SUMMED = "_hvdkit_summed"
SAID: list[tuple[int | None, ...]] = []
"""The shape of the loss that this process has been warned of."""


def mark() -> None:
    """Mark the gradients that tapes take of several numbers from now on; called where an optimizer is distributed."""
    plain = tf.GradientTape.gradient
    if not hasattr(plain, _SUMMED):
        tf.GradientTape.gradient = _marking(plain)


def _marking(plain: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @functools.wraps(plain)
    def gradient(tape: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        gradients = plain(tape, target, sources, output_gradients, *args, **kwargs)
        shape = _summed(target) if output_gradients is None else None
        for one in tf.nest.flatten(gradients) if shape is not None else ():
            if isinstance(one, tf.Tensor):
                setattr(one, _SUMMED, shape)
        return gradients

    setattr(gradient, _SUMMED, None)
    return gradient


def _summed(target: Any) -> Any:
    """The shape of a target's first tensor of several numbers; None where each is one."""
    shapes = [one.shape for one in tf.nest.flatten(target) if tf.is_tensor(one)]
    return next((tuple(one) for one in shapes if one.rank and one.num_elements() != 1), None)


def warn_of_gradients(gradients: Sequence[Any], ranks: int) -> None:
    """Say once that gradients which are about to be averaged are of such a loss."""
    for one in gradients:
        _warn(getattr(one, _SUMMED, None), ranks)


def warn_of_target(target: Any, ranks: int) -> None:
    """The same of what a distributed tape is given."""
    _warn(_summed(target), ranks)


def _warn(shape: tuple[int | None, ...] | None, ranks: int) -> None:
    if shape is None or ranks == 1 or SAID:
        return
    SAID.append(shape)
    warnings.warn(
        f"a tape was given a loss of shape {shape}, whose numbers TensorFlow adds up: where they are one for each "
        f"sample, a step of {ranks} ranks, which averages, is 1/{ranks} of one process's on all their samples; give "
        "it their mean (tf.reduce_mean), or distribute op='sum'.",
        stacklevel=4,
    )
