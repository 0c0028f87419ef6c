"""Steps of the user's own: an optimizer that nobody distributed, weights that nobody reads."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from hvdkit.common.keras_optimizer import is_distributed, is_under_a_distributed_one
from hvdkit.errors import InvalidArgumentError
from hvdkit.keras import state


def warning_of_undistributed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``keras.optimizers.Optimizer.apply``, through which every step passes, whoever makes it."""

    def apply(self: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = list(grads)
        averaged = any(getattr(one, "_hvdkit_reduced", False) for one in gradients)  # by a distributed tape
        alone = state.world().size == 1 or is_distributed(self) or is_under_a_distributed_one()
        if not alone and not averaged:
            _warn(type(self).__name__)
        return plain(self, gradients, *args, **kwargs)

    return apply


@functools.cache
def _warn(optimizer: str) -> None:
    warnings.warn(
        f"rank {state.world().rank} of {state.world().size} takes a step with an optimizer ({optimizer}) that hvdkit "
        "has not distributed: unless you average its gradients yourself, the ranks drift apart; give it to "
        "hvdkit.keras.distribute.",
        stacklevel=3,
    )


@contextmanager
def requiring_weights(model: Any) -> Iterator[None]:
    """Refuse a ``train_step`` of the user's own that does not read the weights of ``shard(remainder="exact")``.

    Raises:
        InvalidArgumentError: in the first step, on every rank.
    """
    plain, own = model.train_step, vars(model).get("train_step")
    if own is None and type(model).train_step is keras.Model.train_step:
        yield
        return

    def train_step(*args: Any) -> Any:
        weights = args[-1][2] if len(args[-1]) == 3 else None
        if weights is None:  # TensorFlow keeps this function for later fits
            return plain(*args)
        result, read = _READ[keras.backend.backend()](plain, args, weights)
        if not read:
            raise InvalidArgumentError(
                f"{type(model).__name__}.train_step does not use the weights of its batch (x, y, sample_weight), with "
                "which remainder='exact' makes the mean over the ranks exact; multiply the losses of the samples by "
                "them, or shard with remainder='drop'."
            )
        if own is None:
            vars(model).pop("train_step", None)
        return result

    vars(model)["train_step"] = train_step
    try:
        yield
    finally:
        vars(model).pop("train_step", None)
        if own is not None:
            vars(model)["train_step"] = own


def _tensorflow_reads(step: Callable[..., Any], args: tuple[Any, ...], weights: Any) -> tuple[Any, bool]:
    import tensorflow as tf

    result = step(*args)
    return result, tf.executing_eagerly() or bool(weights.consumers())


def _torch_reads(step: Callable[..., Any], args: tuple[Any, ...], weights: Any) -> tuple[Any, bool]:
    import torch
    from torch.overrides import TorchFunctionMode

    read = torch.compiler.is_compiling()  # then nothing can look on
    if read:
        return step(*args), read

    class Look(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal read
            read = read or any(one is weights for one in keras.tree.flatten((args, kwargs or {})))
            return func(*args, **(kwargs or {}))

    with Look():
        result = step(*args)
    return result, read


def _jax_reads(step: Callable[..., Any], args: tuple[Any, ...], weights: Any) -> tuple[Any, bool]:
    import jax

    *before, (x, y, _) = args
    traced = jax.make_jaxpr(lambda given: step(*before, (x, y, given)))(weights).jaxpr
    (given,) = traced.invars
    read = any(given is one for equation in traced.eqns for one in equation.invars)
    return step(*args), read


_READ = {"tensorflow": _tensorflow_reads, "torch": _torch_reads, "jax": _jax_reads}
