"""What ``fit`` asks of a model and its data before it trains on several ranks; an inside of ``hvdkit.keras.init``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras
import numpy as np

from hvdkit.errors import AgreementError, InvalidArgumentError, name_ranks
from hvdkit.keras import state
from hvdkit.keras.optimizer import distribute, held_by, made_by_compile
from hvdkit.steps import agreement
from hvdkit.steps.gradients import GradientOptions
from hvdkit.tf_shared.keras_layers import layers_of
from hvdkit.tf_shared.keras_optimizer import is_distributed, is_under_a_distributed_one, move_to_loss_scale, shown
from hvdkit.tf_shared.keras_sharded import shards_in

UNKNOWN = -1


def prepare(model: Any, caller: str = "fit") -> None:
    """Refuse or adapt what cannot be trained on several ranks as it is."""
    if not model.compiled:
        return  # Keras says so itself
    optimizers = held_by(model)
    for optimizer in optimizers.values():
        move_to_loss_scale(optimizer)
    local = {name: one for name, one in optimizers.items() if not is_distributed(one)}
    if "optimizer" in local and len(optimizers) > 1 and made_by_compile(local["optimizer"]):
        unasked = local.pop("optimizer")  # beside the user's own; what train_step does with it nobody knows
        if not local:
            distribute(unasked, GradientOptions(), None)
    if local:
        world = state.world()
        which = shown(local) if len(optimizers) > 1 else f"an {shown(local)}"
        raise InvalidArgumentError(
            f"{caller} was called on rank {world.rank} of {world.size} with {which} that hvdkit has not distributed: "
            "every process would train a model of its own; compile the model with "
            f"{', '.join(f'hvdkit.keras.distribute({name})' for name in local)}."
        )
    ops = {one._hvdkit_distribution.options.op for one in optimizers.values() if hasattr(one, "_hvdkit_distribution")}
    if "average" in ops and "sum" in (getattr(loss, "reduction", "") for loss in keras.tree.flatten(model.loss)):
        _warn_of_sums()
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        warnings.warn(
            "hvdkit trains without jit_compile: Horovod's allreduce has no XLA kernel in TensorFlow. Results are the "
            "same; compile the model with jit_compile=False to say so yourself.",
            stacklevel=3,
        )
        model.jit_compile = False
        model.train_function = None


def refuse_ddp(model: Any) -> None:
    """Refuse a model that PyTorch's DistributedDataParallel trains, as Keras makes one from 3.16 on, if it is asked to.

    Gradients would be averaged twice, over the ranks of ``torch.distributed`` and over hvdkit's, which may be others.
    """
    if keras.backend.backend() != "torch":
        return
    from torch.nn.parallel import DistributedDataParallel

    held = [one for layer in layers_of(model) for one in [*vars(layer).values(), *layer.modules()]]
    if any(isinstance(one, DistributedDataParallel) for one in held):
        raise InvalidArgumentError(
            f"the model {model.name!r} is in a DistributedDataParallel, which averages its gradients over the ranks of "
            "torch.distributed, and hvdkit would average them again; leave out torch.distributed.init_process_group "
            "and what wraps the model, or leave out hvdkit.keras.distribute."
        )


def refuse_swapping(model: Any) -> None:
    """Refuse ``SwapEMAWeights`` where each rank keeps moving averages of parts, which it would take for the whole."""
    if any(shards_in(one) for one in held_by(model).values()):
        raise InvalidArgumentError(
            "SwapEMAWeights exchanges all weights and their moving averages, of which each rank has a part "
            "(shard_state=True); leave one of them out. The optimizer's own use_ema=True works."
        )


def refuse_what_undoes_weights(model: Any) -> None:
    """Refuse losses that are no mean over the global batch."""
    reductions = [getattr(loss, "reduction", None) for loss in keras.tree.flatten(model.loss)]
    wrong = [one for one in reductions if one in ("sum", "mean_with_sample_weight")]
    if wrong:
        raise InvalidArgumentError(
            f"fit got data with remainder='exact' and a loss with reduction={wrong[0]!r}, which undoes the weights "
            "that make the mean over the ranks exact; make the loss with reduction='sum_over_batch_size', or shard "
            "with remainder='drop'."
        )


@functools.cache
def _warn_of_sums() -> None:
    world = state.world()
    warnings.warn(
        f"the loss is a sum (reduction='sum') and its gradients are averaged: a step of {world.size} ranks is 1/"
        f"{world.size} of one process's on all their samples; give distribute op='sum', or make the loss with "
        "reduction='sum_over_batch_size'.",
        stacklevel=4,
    )


@functools.cache
def warn_of_synchronized() -> None:
    """Say once that Keras' synchronised BatchNormalization does not know Horovod's ranks."""
    warnings.warn(
        "BatchNormalization(synchronized=True) synchronises within a tf.distribute strategy, not over Horovod's ranks: "
        "each rank normalises by its own part of the batch.",
        stacklevel=4,
    )


def mark_of(arrays: list[Any]) -> int:
    """A digest of the first samples and the number of them all; unknown for what are no arrays."""
    leaves = [one for one in keras.tree.flatten(arrays) if isinstance(one, np.ndarray) or keras.ops.is_tensor(one)]
    if not leaves or not all(one.shape for one in leaves):
        return UNKNOWN
    rows = [keras.ops.convert_to_numpy(one[:32]) for one in leaves]
    if any(one.dtype.hasobject for one in rows):
        return UNKNOWN
    parts = [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in [*rows, np.array([leaves[0].shape[0]])]]
    return agreement.digest(np.concatenate(parts))


def warn_of_equal_data(marks: list[int]) -> None:
    """Say once, on the root, where ranks got the same samples."""
    same = [rank for rank, mark in enumerate(marks) if mark != UNKNOWN and marks.count(mark) > 1]
    if same and state.world().is_root:
        warnings.warn(
            f"fit got the same samples on {name_ranks(same)}: each trains on all of them, so that an epoch is as much "
            "work as in one process and its samples count several times; give fit the data of "
            "hvdkit.keras.shard((x, y), world, batch_size).",
            stacklevel=2,
        )


def require_same(name: str, values: list[int]) -> None:
    """Raise unless a number is known on all ranks and the same."""
    if UNKNOWN in values:
        ranks = name_ranks([rank for rank, value in enumerate(values) if value == UNKNOWN])
        raise InvalidArgumentError(
            f"the number of {name} is unknown on {ranks} for this kind of data, and ranks with different numbers would "
            "wait for each other forever; give fit(steps_per_epoch=...) or data with a length."
        )
    if len(set(values)) > 1:
        shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values[:8]))
        raise AgreementError(
            f"the ranks would take different numbers of {name} ({shown}{', ...' if len(values) > 8 else ''}) and wait "
            "for each other forever; give every rank the same, see shard and steps_per_epoch."
        )


# Steps of the user's own: an optimizer that nobody distributed, weights that nobody reads ----------------------------


def warning_of_undistributed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``keras.optimizers.Optimizer.apply``, through which every step passes, whoever makes it."""

    def apply(self: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        if not (is_under_a_distributed_one() or is_distributed(self) or state.world().size == 1):
            grads = list(grads)
            if not any(getattr(one, "_hvdkit_reduced", False) for one in grads):  # by a distributed tape
                _warn(type(self).__name__)
        return plain(self, grads, *args, **kwargs)

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

    by_batch = None

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal by_batch
        given = kwargs.get("sample_weight", args[3] if len(args) > 3 else None)
        by_batch = keras.tree.flatten(given)[0] if model in _STEPPING and given is not None else None
        if by_batch is not None and weights != "batch":
            _refuse_added_losses(model)
        return plain["compute_loss"](*args, **kwargs)

    def aggregate(loss: Any) -> Any:
        """Each of the layers' losses, weighed as its batch."""
        total = plain["_aggregate_additional_loss"](loss)
        return total if by_batch is None else total * keras.ops.cast(by_batch[0], total.dtype)

    vars(model).update(dict(train_step=train_step, compute_loss=compute_loss, _aggregate_additional_loss=aggregate))
    try:
        yield
    finally:
        for name in names:
            vars(model).pop(name, None)
        vars(model).update(before)


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
