"""Steps of the user's own: an optimizer that nobody distributed, weights that nobody reads."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras

from hvdkit.errors import InvalidArgumentError
from hvdkit.keras import state
from hvdkit.tf_shared.keras_optimizer import is_distributed, is_under_a_distributed_one


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


_TRACED_FOR: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The kind of weights that the step was made for which Keras keeps of a model; "" where none."""
_STEPPING: WeakSet[Any] = WeakSet()
"""Models in a step; not in a closure, as Keras keeps the ``train_step`` of one ``fit`` for the next."""


def trace_for(model: Any, weights: str) -> None:
    """Have Keras make a model's step anew where the one that it keeps was made for other weights."""
    if _TRACED_FOR.get(model, "") != weights:
        _TRACED_FOR[model] = weights
        model.train_function = None


@contextmanager
def weighing(model: Any, weights: str) -> Iterator[None]:
    """Have the weights of ``shard(remainder="exact")`` reach every loss that a ``fit`` trains on.

    Keras weighs the losses of targets alone. Here its ``compute_loss`` also weighs what layers give to ``add_loss``.

    Args:
        weights: "batch" where they are the same for all samples of a batch, "batch and samples" where each has one of
            the user's, too, which must not reach ``add_loss``; "" for other data, of which nothing is weighed.
    Raises:
        InvalidArgumentError: in the first step, on every rank: a ``train_step`` or ``compute_loss`` of the user's own
            that does not read the weights, or ``add_loss`` beside weights of the user's own.
    """
    trace_for(model, weights)
    if not weights:
        yield
        return
    names = ("train_step", "compute_loss", "_aggregate_additional_loss")
    before = {name: vars(model).pop(name) for name in names if name in vars(model)}
    plain = {name: before.get(name, getattr(model, name)) for name in names}
    own = [name for name in names[:2] if name in before or getattr(type(model), name) is not getattr(keras.Model, name)]
    unread = own[:1]

    def train_step(*args: Any) -> Any:
        nonlocal unread
        given = args[-1][2] if len(args[-1]) == 3 else None
        if given is None:
            return plain["train_step"](*args)
        _STEPPING.add(model)
        try:
            if not unread:
                return plain["train_step"](*args)
            result, read = _READ[keras.backend.backend()](plain["train_step"], args, given)
        finally:
            _STEPPING.discard(model)
        if not read:
            raise InvalidArgumentError(
                f"{type(model).__name__}.{unread[0]} does not use the weights of its batch (x, y, sample_weight), with "
                "which remainder='exact' makes the mean over the ranks exact; multiply the losses of the samples by "
                "them, or shard with remainder='drop'."
            )
        unread = []
        return result

    compute_loss, aggregate = _weighing_added_losses(model, weights, plain["compute_loss"], plain[names[2]])
    vars(model).update(dict(train_step=train_step, compute_loss=compute_loss, _aggregate_additional_loss=aggregate))
    try:
        yield
    finally:
        for name in names:
            vars(model).pop(name, None)
        vars(model).update(before)


def _weighing_added_losses(
    model: Any, weights: str, plain: Callable[..., Any], plain_aggregate: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Keras' ``compute_loss``, and what takes each of the layers' losses into it."""
    by_batch = None

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal by_batch
        given = kwargs.get("sample_weight", args[3] if len(args) > 3 else None)
        by_batch = keras.tree.flatten(given)[0] if model in _STEPPING and given is not None else None
        if by_batch is not None and weights != "batch":
            _refuse_added_losses(model)
        return plain(*args, **kwargs)

    def aggregate(loss: Any) -> Any:
        total = plain_aggregate(loss)
        return total if by_batch is None else total * keras.ops.cast(by_batch[0], total.dtype)

    return compute_loss, aggregate


def _refuse_added_losses(model: Any) -> None:
    regularized = [one for one in model.trainable_variables if one.regularizer is not None]
    if len(model.losses) > len(regularized):
        raise InvalidArgumentError(
            "fit got data with remainder='exact' and weights of the user's own (sample_weight, class_weight), and a "
            "model whose layers call add_loss, which Keras does not weigh by them; shard with remainder='drop'."
        )


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
