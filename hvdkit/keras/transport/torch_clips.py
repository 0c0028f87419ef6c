"""Gradients that PyTorch clips before Keras' optimizer averages them, each rank by its own norm, are an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import utils

from hvdkit.steps.gradients import CLIPPED

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


def mark() -> None:
    """Mark what PyTorch's functions clip from now on; called where an optimizer is distributed."""
    for name in _FUNCTIONS:
        plain = getattr(utils, name, None)  # the last is of PyTorch 2.6
        if plain is not None and not hasattr(plain, CLIPPED):
            setattr(utils, name, _marking(plain))


def _marking(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = plain(parameters, *args, **kwargs)
        for one in parameters:
            if one.grad is not None:
                setattr(one.grad, CLIPPED, True)
        return given

    setattr(clip, CLIPPED, False)
    return clip
