"""Marks on gradients, from where an optimizer is distributed: what a rank did to them before they are averaged.

What it has clipped by its own norm, which no mean over the ranks can mend, is an error; what TensorFlow added up, of a
loss that has one number for each sample, is one warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import dispatch

from hvdkit.steps.gradients import CLIPPED

_CLIPPING = ("clip_by_global_norm", "clip_by_norm", "clip_by_value")
_DISPATCHED = getattr(dispatch, "_TYPE_BASED_DISPATCH_SIGNATURES", {})
"""Where ``tf.experimental.dispatch_for_api`` looks a function up; no public name leads there."""
_SUMMED = "_hvdkit_summed"
WARNED: list[tuple[int | None, ...]] = []
"""The shape of the loss that this process has been warned of."""


def mark() -> None:
    """Mark from now on what TensorFlow's functions clip, and what tapes take of several numbers."""
    if not hasattr(tf.GradientTape.gradient, _SUMMED):
        tf.GradientTape.gradient = _marking_sums(tf.GradientTape.gradient)
    for name in _CLIPPING:
        plain = getattr(tf, name)
        if not hasattr(plain, CLIPPED):
            marking = _marking_clipped(plain)
            if plain in _DISPATCHED:
                _DISPATCHED[marking] = _DISPATCHED[plain]
            setattr(tf, name, marking)


def _marking_clipped(plain: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @functools.wraps(plain)
    def clip(*args: Any, **kwargs: Any) -> Any:
        clipped = plain(*args, **kwargs)
        gradients = clipped[0] if isinstance(clipped, tuple) else [clipped]  # beside them the norm, as it was given
        for one in gradients:
            if isinstance(one, (tf.Tensor, tf.IndexedSlices)):
                setattr(one, CLIPPED, True)
        return clipped

    setattr(clip, CLIPPED, False)
    return clip


def _marking_sums(plain: Callable[..., Any]) -> Any:
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
    if shape is None or ranks == 1 or WARNED:
        return
    WARNED.append(shape)
    warnings.warn(
        f"a tape was given a loss of shape {shape}, whose numbers TensorFlow adds up: where they are one for each "
        f"sample, a step of {ranks} ranks, which averages, is 1/{ranks} of one process's on all their samples; give "
        "it their mean (tf.reduce_mean), or distribute op='sum'.",
        stacklevel=4,
    )
