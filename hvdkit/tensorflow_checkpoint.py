"""What a checkpoint of a TensorFlow training holds, and how it is put back: the inside of ``Checkpoints``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit import __version__, tensorflow_random_state, tensorflow_seeds, tensorflow_state
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps.checkpoint import CheckpointDirectory, Saved, checked
from hvdkit.tensorflow_data import require_sharded
from hvdkit.tensorflow_schedule import Warmup, get_rate, has_own_rate, set_rate
from hvdkit.tensorflow_state import on_root
from hvdkit.tensorflow_tape import canonical_name, native

_RANDOM = "random.npy"


class Store:
    """Saves and restores; every method is a collective.

    Args:
        directory, keep, keep_best: see ``CheckpointDirectory``.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int, keep_best: int) -> None:
        self._directory = CheckpointDirectory(directory, keep, keep_best)

    def save(
        self,
        model: Any,
        optimizer: Any | None,
        step: int,
        loader: Any,
        score: float | None,
        metadata: dict[str, Any],
    ) -> Saved:
        tensorflow_state.require_eager("Checkpoints.save")
        facts = {**_facts(optimizer, loader), **metadata}
        states = _random_states(model)

        def write(directory: Path) -> None:
            np.save(directory / _RANDOM, states, allow_pickle=False)
            _write_variables(directory / "model", tensorflow_state.model_variables(model))
            if optimizer is not None:
                _write_variables(directory / "optimizer", tensorflow_state.optimizer_variables(optimizer, model))

        def on_disk() -> Saved:
            checked(step, facts, score)
            return self._directory.save(step, write, facts, score)

        return cast(Saved, on_root(on_disk))

    def read(self, model: Any, optimizer: Any | None, which: str) -> Any:
        """On the root: load the files; on all ranks: what was found, and the ranks' random states."""
        tensorflow_state.require_eager("Checkpoints.restore")
        if which not in ("latest", "best"):
            raise InvalidArgumentError(f"which must be latest or best, got {which!r}.")

        def load() -> Any:
            saved = self._directory.latest() if which == "latest" else self._directory.best()
            if saved is None:
                return None, None
            variables = tensorflow_state.model_variables(model)
            values = _read_variables(saved.path / "model", variables, model)
            if optimizer is not None:
                slots = tensorflow_state.optimizer_variables(optimizer, model)
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
        "seed": tensorflow_seeds.seed(),
    }
    if optimizer is not None:
        tensorflow_state.require_keras_optimizer(optimizer)
        facts["learning_rates"] = [get_rate(optimizer)]
    if loader is not None:
        facts["data"] = require_sharded(loader).state()
    return facts


def own_rate(optimizer: Any | None) -> float | None:
    """The learning rate that an optimizer was made with; None where it follows a schedule of its own, or is None."""
    if optimizer is None:
        return None
    tensorflow_state.require_keras_optimizer(optimizer)
    return get_rate(optimizer) if has_own_rate(optimizer) else None


def resume(
    saved: Saved, states: Any, model: Any, optimizer: Any | None, loader: Any, schedule: Any, rate: float | None
) -> None:
    """Put a training on all ranks where the checkpoint was, also when their number is another one.

    Args:
        saved, states: from ``Store.read``.
        rate: the learning rate that the optimizer was made with for this number of ranks, from ``own_rate``.
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
    layers = tensorflow_state.generator_states(model)
    if optimizer is not None and states is not None and same_size:
        tensorflow_random_state.restore(states[hvd.rank()], layers)
    elif optimizer is not None and not same_size:
        tensorflow_seeds.branch(layers, saved.step)


def _random_states(model: Any) -> Any:
    """The states of all ranks' generators, int64 (size, length); a collective."""
    mine = tensorflow_random_state.capture(tensorflow_state.generator_states(model))
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
