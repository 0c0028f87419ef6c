"""Gradients that a rank has clipped by its own norm, which no mean over the ranks can mend, are an error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import dispatch

from hvdkit.steps.gradients import clipped_too_early

_FUNCTIONS = ("clip_by_global_norm", "clip_by_norm", "clip_by_value")
_CLIPPED = "_hvdkit_clipped"
_DISPATCHED = getattr(dispatch, "_TYPE_BASED_DISPATCH_SIGNATURES", {})
"""Where ``tf.experimental.dispatch_for_api`` looks a function up; no public name leads there."""


def mark() -> None:
    """Mark what TensorFlow's functions clip from now on; called where an optimizer is distributed."""
    for name in _FUNCTIONS:
        plain = getattr(tf, name)
        if not hasattr(plain, _CLIPPED):
            marking = _marking(plain)
            if plain in _DISPATCHED:
                _DISPATCHED[marking] = _DISPATCHED[plain]
            setattr(tf, name, marking)


def _marking(plain: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @functools.wraps(plain)
    def clip(*args: Any, **kwargs: Any) -> Any:
        clipped = plain(*args, **kwargs)
        gradients = clipped[0] if isinstance(clipped, tuple) else [clipped]  # beside them the norm, as it was given
        for one in gradients:
            if isinstance(one, (tf.Tensor, tf.IndexedSlices)):
                setattr(one, _CLIPPED, True)
        return clipped

    setattr(clip, _CLIPPED, False)
    return clip


def refuse(gradients: Sequence[Any]) -> None:
    """Raise InvalidArgumentError where a gradient that is about to be averaged has been clipped."""
    for number, gradient in enumerate(gradients, 1):
        if getattr(gradient, _CLIPPED, False):
            also = ", or distribute the tape and clip what its gradient() returns,"
            raise clipped_too_early(f"{number} of {len(gradients)}", gradient.shape, also)
