"""Checkpoints of a TensorFlow training (step 6): what they hold, and how it is put back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit import __version__
from hvdkit.core.communicator import Communicator
from hvdkit.errors import CheckpointError
from hvdkit.steps.checkpoint import Saved
from hvdkit.steps.resume import ModelCheckpoints
from hvdkit.tensorflow import seeds, state
from hvdkit.tensorflow.data import require_sharded
from hvdkit.tensorflow.schedule import Warmup
from hvdkit.tensorflow.state import native
from hvdkit.tf_shared.keras_layers import plain_path
from hvdkit.tf_shared.keras_optimizer import make_slots, rates, set_rates, trained_variables
from hvdkit.tf_shared.keras_sharded import shared_variables
from hvdkit.tf_shared.keras_sharded_files import (
    are_divided,
    assign,
    matched,
    prepare,
    read_pieces,
    shared_of,
    slot_values,
    split_whole,
    writer,
)

_TRAINED = "trained.npy"  # which variables each of several optimizers has slots for


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
    _rates = staticmethod(rates)
    _set_rates = staticmethod(set_rates)
    _broadcast = staticmethod(state.broadcast)

    def _is_started(self) -> bool:
        return bool(hvd.is_initialized())

    def _all_ranks(self) -> Communicator:
        return state.RANKS

    def _facts(self, optimizer: Any) -> dict[str, Any]:
        facts = {
            "hvdkit": __version__,
            "framework": "tensorflow",
            "tensorflow": tf.__version__,
            "seed": seeds.CURRENT.seed(),
        }
        return facts if optimizer is None else {**facts, "learning_rates": self._rates(optimizer)}

    def _optimizers(self, model: Any, optimizer: Any) -> Any:  # noqa: ARG002
        return dict(sorted(state.by_name(optimizer).items())) or None

    def _save(self, model: Any, optimizer: Any, *arguments: Any) -> Any:
        state.require_eager("Checkpoints.save")
        prepare(optimizer, lambda: state.trainable_variables(model))
        return super()._save(model, optimizer, *arguments)

    def _restore(self, *arguments: Any, **options: Any) -> Saved | None:
        state.require_eager("Checkpoints.restore")  # before rates are read, which a graph cannot
        return super()._restore(*arguments, **options)

    def _load(self, model: Any, optimizer: Any, *arguments: Any, **options: Any) -> tuple[Saved | None, Any]:
        prepare(optimizer, lambda: state.trainable_variables(model))
        return super()._load(model, optimizer, *arguments, **options)

    def _write_own(self, optimizer: Any) -> Callable[[Path], Path] | None:
        return writer(optimizer, self._ranks())

    def _read_own(self, saved: Saved, optimizer: Any) -> Callable[[], None]:
        prefix, pieces = saved.path / "optimizer", read_pieces(saved.path)
        if pieces is None:
            _, pieces = split_whole(optimizer, _values_in_order(prefix, optimizer), str(prefix))
        slots = slot_values(optimizer, pieces, str(prefix))
        return lambda: assign(slots)

    def _write(self, directory: Path, model: Any, optimizer: Any) -> None:
        variables = state.model_variables(model)
        _write_variables(directory / "model", _keyed(variables))
        if optimizer is not None:
            _write_variables(directory / "optimizer", _keyed_slots(optimizer, model))
            if len(optimizer) > 1:
                np.save(directory / _TRAINED, trained_variables(optimizer, variables), allow_pickle=False)

    def _read(self, saved: Saved, model: Any, optimizer: Any, **options: Any) -> Callable[[], None]:  # noqa: ARG002
        directory = saved.path
        variables = state.model_variables(model)
        values = _read_variables(directory / "model", _keyed(variables), type(model).__name__)
        if optimizer is not None:
            if (directory / _TRAINED).exists():
                make_slots(optimizer, variables, np.load(directory / _TRAINED, allow_pickle=False))
            values += _read_optimizers(directory, optimizer, model)

        def put() -> None:
            for variable, value in values:
                variable.assign(value)

        return put

    def _random_states(self, model: Any) -> Any:
        """int64 (size, length)."""
        mine = seeds.capture(state.generators_of(model))
        return np.stack(self._ranks().allgather(mine, "hvdkit.random_states"))

    def _set_random_state(self, saved: Saved, model: Any, own: Any) -> None:  # noqa: ARG002
        seeds.restore(own, state.generators_of(model))

    def _branch(self, model: Any, step: int) -> None:
        seeds.branch(state.generators_of(model), step)


def _read_optimizers(directory: Path, optimizers: Mapping[str, Any], model: Any) -> list[tuple[Any, Any]]:
    """The variables of optimizers with their values, but for those that each rank keeps alone."""
    prefix, kinds = directory / "optimizer", " and ".join(type(one).__name__ for one in optimizers.values())
    keyed = _keyed_slots(optimizers, model)
    pieces, divided = read_pieces(directory), are_divided(optimizers)
    if not divided and pieces is None:
        return _read_variables(prefix, keyed, kinds)
    values = _values_in_order(prefix, optimizers)
    if pieces is None:
        values, _ = split_whole(optimizers, values, str(prefix))
    found = matched(shared_of(optimizers), values, str(prefix))
    return found if divided or pieces is None else found + slot_values(optimizers, pieces, str(prefix))


def _values_in_order(prefix: Path, optimizers: Mapping[str, Any]) -> list[Any]:
    """The values that ``_write_variables`` wrote of optimizers, in the order of their variables."""
    names = [""] if len(optimizers) == 1 else [f"{_safe(name)}_" for name in optimizers]
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        saved = sorted(name for name in reader.get_variable_to_shape_map() if name.startswith("variables/"))
        return [
            reader.get_tensor(one)
            for name in names
            for one in saved
            if re.match(rf"variables/{re.escape(name)}\d{{5}}_", one)
        ]
    except tf.errors.OpError as error:
        _raise_misfit(prefix, "optimizer", " ".join(str(error.message).split()))


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def _keyed(variables: Sequence[Any]) -> dict[str, tf.Variable]:
    names = [_safe(plain_path(variable)) for variable in variables]
    return {
        f"{position:05d}_{name}": native(variable)
        for position, (name, variable) in enumerate(zip(names, variables, strict=True))
    }


def _keyed_slots(optimizers: Mapping[str, Any], model: Any) -> dict[str, tf.Variable]:
    """All variables of optimizers but those of one rank; those of several with the optimizer's name before theirs."""
    if len(optimizers) == 1:
        return _keyed(state.optimizer_variables(optimizers, model))
    keyed = {name: _keyed(shared_variables(optimizer)) for name, optimizer in optimizers.items()}
    return {f"{_safe(name)}_{key}": variable for name, mine in keyed.items() for key, variable in mine.items()}


def _write_variables(prefix: Path, variables: Mapping[str, tf.Variable]) -> None:
    """Write variables in TensorFlow's checkpoint format, as PREFIX.index and PREFIX.data-*.

    Raises:
        OSError: TensorFlow could not write.
    """
    try:
        tf.train.Checkpoint(variables=dict(variables)).write(str(prefix))
    except tf.errors.OpError as error:
        raise OSError(str(error.message).split("; ")[-1].split(" [Op:")[0]) from error  # "... PATH; No space left ..."


def _read_variables(prefix: Path, variables: Mapping[str, tf.Variable], owner: str) -> list[tuple[tf.Variable, Any]]:
    """The values that ``_write_variables`` wrote, each with the variable that it belongs to; nothing is assigned.

    Raises:
        CheckpointError: the file cannot be read, or was written for other variables.
    """
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        saved = {name for name in shapes if name.startswith("variables/")}
        wanted = {f"variables/{key}/.ATTRIBUTES/VARIABLE_VALUE": variable for key, variable in variables.items()}
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


def _raise_misfit(prefix: Path, owner: str, reason: str) -> NoReturn:
    raise CheckpointError(f"{prefix} does not fit this {owner}: {reason}")
