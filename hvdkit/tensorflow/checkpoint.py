"""Checkpoints of a TensorFlow training (step 6): what they hold, and how it is put back."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit import __version__
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps.checkpoint import CheckpointDirectory, Saved, checked
from hvdkit.tensorflow import random_state, seeds, state
from hvdkit.tensorflow.data import require_sharded
from hvdkit.tensorflow.optimizer import canonical_name, native
from hvdkit.tensorflow.schedule import Warmup, get_rate, has_own_rate, set_rate
from hvdkit.tensorflow.state import on_root

_RANDOM = "random.npy"


class Checkpoints:
    """Checkpoints that only the root writes and that every rank restores alike (step 6).

    Every method is a collective: call it on all ranks. An error is raised on every rank, not on the root alone.
    The files are TensorFlow checkpoints: ``tf.train.load_checkpoint`` reads them without hvdkit.

    Args:
        directory: where they live, on a file system that the root can write.
        keep: how many of the newest stay.
        keep_best: how many with the highest scores stay beside them.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3, *, keep_best: int = 0) -> None:
        self._directory = CheckpointDirectory(directory, keep, keep_best)

    def save(
        self,
        model: Any,
        optimizer: Any | None = None,
        *,
        step: int,
        loader: Any = None,
        score: float | None = None,
        **metadata: Any,
    ) -> Saved:
        """Write model, optimizer and the ranks' random states as the checkpoint of ``step``.

        Args:
            model, optimizer: as for ``broadcast_state``.
            step: optimizer steps completed.
            loader: from ``shard``; its position, counted in samples, is saved too.
            score: how good it is, the higher the better, for ``keep_best`` and ``restore(which="best")``.
            metadata: JSON values to find again in ``Saved.metadata``, for example ``accuracy=0.93``.
        Returns:
            The checkpoint, complete on disk.
        Raises:
            InvalidArgumentError: a bad step or score, metadata that is not JSON, a call inside ``tf.function``, or a
                loader whose position is unknown because it was iterated inside ``tf.function`` or behind ``.map()``.
            CheckpointError: it could not be written; earlier checkpoints are intact.
        """
        state.require_eager("Checkpoints.save")
        facts = {**_facts(optimizer, loader), **metadata}
        states = _random_states(model)

        def write(directory: Path) -> None:
            np.save(directory / _RANDOM, states, allow_pickle=False)
            _write_variables(directory / "model", state.model_variables(model))
            if optimizer is not None:
                _write_variables(directory / "optimizer", state.optimizer_variables(optimizer, model))

        def on_disk() -> Saved:
            checked(step, facts, score)
            return self._directory.save(step, write, facts, score)

        return cast(Saved, on_root(on_disk))

    def restore(
        self,
        model: Any,
        optimizer: Any | None = None,
        *,
        loader: Any = None,
        schedule: Any = None,
        which: str = "latest",
    ) -> Saved | None:
        """Load a valid checkpoint on the root and broadcast it; None, and nothing changed, when there is none.

        The number of ranks may be another one than when it was saved: the loader goes on at the same sample of the
        same order, the schedule at the same sample of its warmup, and the optimizer keeps the learning rate that it
        was made with. On as many ranks as before everything continues bit for bit (on CPUs), random numbers included;
        only ``tf.random`` operations inside a ``tf.function``, whose count cannot be read, begin anew.

        Args:
            loader: from ``shard``, over the same data with the same seed; goes on where it was.
            schedule: from ``warmup``; needs the loader.
            which: "latest" or "best" (the highest score).
        Returns:
            Where it was, its step and metadata, and which newer ones were skipped and why.
        Raises:
            CheckpointError: checkpoints exist but none is valid, or it belongs to another model, optimizer or data.
            InvalidArgumentError: a loader or schedule that is not hvdkit's, an unknown ``which``, or a call inside
                ``tf.function``.
        """
        rate = _own_rate(optimizer)
        saved, states = self._read(model, optimizer, which)
        if saved is not None:
            state.broadcast(model, optimizer)
            _resume(saved, states, model, optimizer, loader, schedule, rate)
        return cast("Saved | None", saved)

    def _read(self, model: Any, optimizer: Any | None, which: str) -> Any:
        """On the root: load the files; on all ranks: what was found, and the ranks' random states."""
        state.require_eager("Checkpoints.restore")
        if which not in ("latest", "best"):
            raise InvalidArgumentError(f"which must be latest or best, got {which!r}.")

        def load() -> Any:
            saved = self._directory.latest() if which == "latest" else self._directory.best()
            if saved is None:
                return None, None
            variables = state.model_variables(model)
            values = _read_variables(saved.path / "model", variables, model)
            if optimizer is not None:
                slots = state.optimizer_variables(optimizer, model)
                values += _read_variables(saved.path / "optimizer", slots, optimizer)
            states = _read_random(saved.path / _RANDOM)
            for variable, value in values:
                variable.assign(value)
            return saved, states

        return on_root(load)


def _facts(optimizer: Any | None, loader: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "hvdkit": __version__,
        "framework": "tensorflow",
        "tensorflow": tf.__version__,
        "size": hvd.size(),
        "seed": seeds.seed(),
    }
    if optimizer is not None:
        state.require_keras_optimizer(optimizer)
        facts["learning_rates"] = [get_rate(optimizer)]
    if loader is not None:
        facts["data"] = require_sharded(loader).state()
    return facts


def _own_rate(optimizer: Any | None) -> float | None:
    """The learning rate that an optimizer was made with; None where it follows a schedule of its own, or is None."""
    if optimizer is None:
        return None
    state.require_keras_optimizer(optimizer)
    return get_rate(optimizer) if has_own_rate(optimizer) else None


def _resume(
    saved: Saved, states: Any, model: Any, optimizer: Any | None, loader: Any, schedule: Any, rate: float | None
) -> None:
    """Put a training on all ranks where the checkpoint was, also when their number is another one.

    Args:
        saved, states: from ``Checkpoints._read``.
        rate: the learning rate that the optimizer was made with for this number of ranks, from ``_own_rate``.
    """
    same_size = saved.metadata.get("size") == hvd.size()
    if rate is not None and not same_size:
        set_rate(optimizer, rate)
    if loader is not None:
        data = saved.metadata.get("data")
        if data is None:
            raise CheckpointError(f"{saved.path} holds no position in the data; save with loader=, or restore without.")
        require_sharded(loader).load_state(data)
    if schedule is not None:
        if not isinstance(schedule, Warmup) or loader is None:
            raise InvalidArgumentError("schedule must be from warmup, and needs the loader, which says how far it is.")
        schedule.go_to(loader.position.steps(loader.share))
    layers = state.generator_states(model)
    if optimizer is not None and states is not None and same_size:
        random_state.restore(states[hvd.rank()], layers)
    elif optimizer is not None and not same_size:
        seeds.branch(layers, saved.step)


def _random_states(model: Any) -> Any:
    """The states of all ranks' generators, int64 (size, length); a collective."""
    mine = random_state.capture(state.generator_states(model))
    return hvd.allgather(mine[None], name="hvdkit.random_states").numpy()


def _read_random(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False) if file.exists() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _keyed(variables: Sequence[Any]) -> dict[str, tf.Variable]:
    names = [re.sub(r"[^A-Za-z0-9_]", "_", canonical_name(variable)) for variable in variables]
    return {
        f"{position:05d}_{name}": native(variable)
        for position, (name, variable) in enumerate(zip(names, variables, strict=True))
    }


def _write_variables(prefix: Path, variables: Sequence[Any]) -> None:
    """Write variables in TensorFlow's checkpoint format, as PREFIX.index and PREFIX.data-*.

    Raises:
        OSError: TensorFlow could not write.
    """
    try:
        tf.train.Checkpoint(variables=_keyed(variables)).write(str(prefix))
    except tf.errors.OpError as error:
        raise OSError(str(error.message).split("; ")[-1].split(" [Op:")[0]) from error  # "... PATH; No space left ..."


def _read_variables(prefix: Path, variables: Sequence[Any], owner: Any) -> list[tuple[tf.Variable, Any]]:
    """The values that ``_write_variables`` wrote, each with the variable that it belongs to; nothing is assigned.

    Raises:
        CheckpointError: the file cannot be read, or was written for other variables.
    """
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        saved = {name for name in shapes if name.startswith("variables/")}
        wanted = {
            f"variables/{key}/.ATTRIBUTES/VARIABLE_VALUE": variable for key, variable in _keyed(variables).items()
        }
        for name in sorted(saved ^ wanted.keys()):
            _raise_misfit(prefix, owner, f"{name.split('/')[1]} is in {'the file' if name in saved else 'it'} alone")
        for name, variable in wanted.items():
            mine, theirs = (variable.shape.as_list(), variable.dtype), (shapes[name], types[name])
            if mine != theirs:
                found = f"{theirs[1].name} {tuple(theirs[0])}, not {mine[1].name} {tuple(mine[0])}"
                _raise_misfit(prefix, owner, f"{name.split('/')[1]} is {found}")
        return [(variable, reader.get_tensor(name)) for name, variable in wanted.items()]
    except tf.errors.OpError as error:
        _raise_misfit(prefix, owner, " ".join(str(error.message).split()))


def _raise_misfit(prefix: Path, owner: Any, reason: str) -> NoReturn:
    raise CheckpointError(f"{prefix} does not fit this {type(owner).__name__}: {reason}")
