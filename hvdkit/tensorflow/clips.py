"""Gradients that a rank has clipped by its own norm, which no mean over the ranks can mend, are an error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.errors import InvalidArgumentError

_FUNCTIONS = ("clip_by_global_norm", "clip_by_norm", "clip_by_value")
_CLIPPED = "_hvdkit_clipped"


def mark() -> None:
    """Mark what TensorFlow's functions clip from now on; called where an optimizer is distributed."""
    for name in _FUNCTIONS:
        plain = getattr(tf, name)
        if not hasattr(plain, _CLIPPED):
            setattr(tf, name, _marking(plain))


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
            raise InvalidArgumentError(
                f"gradient {number} of {len(gradients)}, of shape {gradient.shape}, was clipped before it is averaged, "
                "by what this rank has; one process clips that of all samples. Distribute the tape and clip what "
                "its gradient() returns, or give the optimizer global_clipnorm=, clipnorm= or clipvalue=."
            )
