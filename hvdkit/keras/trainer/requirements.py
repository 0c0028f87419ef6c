"""What ``fit`` asks of a model and its data before it trains on several ranks; an inside of ``hvdkit.keras.init``."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras
import numpy as np

from hvdkit.errors import AgreementError, InvalidArgumentError, name_ranks
from hvdkit.keras import state
from hvdkit.keras.optimizer import distribute, held_by, made_by_compile
from hvdkit.steps import agreement
from hvdkit.steps.gradients import GradientOptions
from hvdkit.tf_shared.keras_optimizer import is_distributed, move_to_loss_scale, shown

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
