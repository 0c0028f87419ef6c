"""Gradients that JAX or optax clips before Keras' optimizer averages them, each rank by its own norm, are an error."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_OF_OPTAX = ("adaptive_grad_clip", "clip", "clip_by_block_rms", "clip_by_global_norm")
_MARKING = "_hvdkit_marking"
_CLIPPED: dict[int, weakref.ref[Any]] = {}
"""By id: what JAX computes with takes no attributes and has no hash."""


def mark() -> None:
    """Mark what these functions clip from now on; optax's where it has been imported."""
    if not hasattr(jnp.clip, _MARKING):
        jnp.clip = _marking(jnp.clip)
    optax = sys.modules.get("optax")
    for name in _OF_OPTAX if optax is not None else ():
        if not hasattr(getattr(optax, name), _MARKING):
            setattr(optax, name, _marking_updates(getattr(optax, name)))


def _marking(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def clip(*args: Any, **kwargs: Any) -> Any:
        clipped = plain(*args, **kwargs)
        _remember(clipped)
        return clipped

    setattr(clip, _MARKING, True)
    return clip


def _marking_updates(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Any:
        transformation = plain(*args, **kwargs)

        def update(*given: Any, **options: Any) -> Any:
            updates, state = transformation.update(*given, **options)
            for one in jax.tree.leaves(updates):
                _remember(one)
            return updates, state

        return transformation._replace(update=update)

    setattr(make, _MARKING, True)
    return make


def is_clipped(gradient: Any) -> bool:
    """Whether a function that is marked has clipped it."""
    return id(gradient) in _CLIPPED


def _remember(clipped: Any) -> None:
    number = id(clipped)
    _CLIPPED[number] = weakref.ref(clipped, lambda _: _CLIPPED.pop(number, None))
