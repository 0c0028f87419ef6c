"""Checkpoints of a TensorFlow training (step 6): what they hold, and how it is put back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit import __version__
from hvdkit.errors import CheckpointError
from hvdkit.steps.checkpoint import Saved
from hvdkit.steps.collectives import Collectives
from hvdkit.steps.resume import ModelCheckpoints
from hvdkit.tensorflow import random_state, seeds, state
from hvdkit.tensorflow.data import require_sharded
from hvdkit.tensorflow.optimizer import canonical_name, native
from hvdkit.tensorflow.schedule import Warmup, get_rate, has_own_rate, set_rate


class Checkpoints(ModelCheckpoints[Saved]):
    """Checkpoints that only the root writes and that every rank restores alike (step 6).

    Every method is a collective: call it on all ranks. An error is raised on every rank, not on the root alone.
    The files are TensorFlow checkpoints: ``tf.train.load_checkpoint`` reads them without hvdkit.

    Args:
        directory: where they live, on a file system that the root can write.
        keep: how many of the newest stay.
        keep_best: how many with the highest scores stay beside them.
        wait: seconds to wait for another job that writes there, before an error; 2 for one that is just ending.
    """

    _warmup = Warmup
    _require_loader = staticmethod(require_sharded)
    _broadcast = staticmethod(state.broadcast)

    def _ranks(self) -> Collectives:
        return state.RANKS

    def _facts(self, optimizer: Any) -> dict[str, Any]:
        facts = {
            "hvdkit": __version__,
            "framework": "tensorflow",
            "tensorflow": tf.__version__,
            "seed": seeds.CURRENT.seed(),
        }
        if optimizer is None:
            return facts
        state.require_keras_optimizer(optimizer)
        return {**facts, "learning_rates": [get_rate(optimizer)]}

    def _rates(self, optimizer: Any) -> list[float]:
        state.require_keras_optimizer(optimizer)
        return [get_rate(optimizer)] if has_own_rate(optimizer) else []

    def _set_rates(self, optimizer: Any, rates: list[float]) -> None:
        for rate in rates:
            set_rate(optimizer, rate)

    def _save(self, *arguments: Any) -> Any:
        state.require_eager("Checkpoints.save")
        return super()._save(*arguments)

    def _load(self, *arguments: Any) -> tuple[Saved | None, Any]:
        state.require_eager("Checkpoints.restore")
        return super()._load(*arguments)

    def _write(self, directory: Path, model: Any, optimizer: Any) -> None:
        _write_variables(directory / "model", state.model_variables(model))
        if optimizer is not None:
            _write_variables(directory / "optimizer", state.optimizer_variables(optimizer, model))

    def _read(self, directory: Path, model: Any, optimizer: Any) -> Callable[[], None]:
        values = _read_variables(directory / "model", state.model_variables(model), model)
        if optimizer is not None:
            slots = state.optimizer_variables(optimizer, model)
            values += _read_variables(directory / "optimizer", slots, optimizer)

        def put() -> None:
            for variable, value in values:
                variable.assign(value)

        return put

    def _random_states(self, model: Any) -> Any:
        """int64 (size, length)."""
        mine = random_state.capture(state.generator_states(model))
        return hvd.allgather(mine[None], name="hvdkit.random_states").numpy()

    def _set_random_state(self, saved: Saved, model: Any, own: Any) -> None:  # noqa: ARG002
        random_state.restore(own, state.generator_states(model))

    def _branch(self, model: Any, step: int) -> None:
        seeds.branch(state.generator_states(model), step)


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
