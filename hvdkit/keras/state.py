"""How the state of a Keras 3 training is named, compared, sent and saved; the inside of ``hvdkit.keras``."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.keras import private
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps import agreement, metrics
from hvdkit.steps.divergence import Seen, is_mask
from hvdkit.steps.manifest import require_stored
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared import keras_sharded_files
from hvdkit.tf_shared.keras_layers import layers_of, on_host, plain_path, untrained_of
from hvdkit.tf_shared.keras_optimizer import make_slots, require_keras_3, shown, trained_variables
from hvdkit.tf_shared.keras_sharded import by_checkpoints, shared_variables

_WEIGHTS, _LAYOUT = "model.weights.h5", "model.layout.json"
_HDF5_FILE, _HDF5_ARRAY = 16384, 4096
"""Bytes that HDF5 may need beside the numbers, for a file and for each array in it."""
_FLOATS = ("float16", "float32", "float64")
_started: list[Topology] = []


def start() -> Topology:
    """Start the communication library, where it is not running, and remember this process's place."""
    _started[:] = [TRANSPORT.start_library()]
    TRANSPORT.in_step = True
    return _started[0]


def follow(new: Topology) -> Topology:
    """Remember this process's place after ranks have come or gone."""
    _started[:] = [new]
    return new


def is_started() -> bool:
    """Whether ``init`` was called."""
    return bool(_started)


def world() -> Topology:
    """This process's place in the job.

    Raises:
        InvalidArgumentError: nothing was started yet.
    """
    if not _started:
        raise InvalidArgumentError("the ranks are not connected yet; call hvdkit.keras.init() first.")
    return _started[0]


def model_variables(model: Any) -> list[Any]:
    """Weights and statistics of a model, not metrics and the states of random generators.

    Raises:
        InvalidArgumentError: not a Keras 3 model, or one that is not built.
    """
    require_keras_3(model, keras.Model, "hvdkit.keras")
    if not is_built(model):
        raise InvalidArgumentError(
            f"the model {model.name!r} is not built yet, so it has no weights to send or compare; give it a "
            "keras.Input, or call it on one batch, on every rank first."
        )
    return list(model.weights)


def is_built(model: Any) -> bool:
    """Whether a model has its weights. One without ``call`` is never built itself: there the layers say it."""
    return bool(model.built or (model.weights and not private.unbuilt_layers(model)))


def optimizer_variables(optimizers: Mapping[str, Any], model: Any) -> list[Any]:
    """Counters, learning rates and slots of optimizers, but for those that a rank keeps alone (``shard_state``).

    The slots are made first where a single one has none yet.
    """
    for optimizer in optimizers.values():
        if not optimizer.built and len(optimizers) == 1:
            optimizer.build(model.trainable_variables)
    return [variable for optimizer in optimizers.values() for variable in shared_variables(optimizer)]


def value_of(variable: Any) -> npt.NDArray[Any]:
    """A copy on the host, in the variable's own type and shape."""
    return np.array(on_host(variable), order="C")


def number(value: Any) -> float:
    """A scalar tensor, variable or number as a float."""
    return float(on_host(value))


def layout(variable: Any) -> str:
    """Path without automatic numbers, type and shape: equal on ranks that have built other layers before."""
    return f"{plain_path(variable)} {keras.backend.standardize_dtype(variable.dtype)} {tuple(variable.shape)}"


def average_statistics(variables: Sequence[Any]) -> None:
    """Set floating variables that differ between ranks, but masks, to their mean over the ranks; a collective."""
    values = [value_of(one) for one in variables]
    table = agreement.digest_table([one.path for one in variables], list(map(agreement.digest, values)))
    masks = np.array(list(map(is_mask, values)), dtype=np.int64)
    tables = np.stack(TRANSPORT.allgather(np.column_stack([table, masks]), "hvdkit.statistics"))
    differs = (tables[:, :, 1] != tables[0, :, 1]).any(axis=0) & ~tables[:, :, 2].all(axis=0)
    for variable in (variables[position] for position in np.flatnonzero(differs).tolist()):
        if keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype)):
            mine = value_of(variable)
            total = TRANSPORT.allreduce(mine.astype(np.float64), "hvdkit.statistics")
            variable.assign((total / world().size).astype(mine.dtype))


def untrained_state(model: Any, suspects: Collection[str]) -> Seen:
    """What no gradient trains and every rank is to hold alike: not statistics, and not vectors of spectral norms."""
    layers = layers_of(model)
    kept = {id(one): one for layer in layers for one in untrained_of(layer)}
    own = {
        id(one)
        for layer in layers
        for one in untrained_of(layer)
        if isinstance(layer, (keras.layers.BatchNormalization, keras.layers.SpectralNormalization))
        or one.name.startswith(("moving_", "running_"))
    }
    variables = [one for one in model.non_trainable_weights if id(one) not in own]
    frozen = len([one for one in variables if id(one) not in kept])
    variables.sort(key=lambda one: id(one) in kept)
    if keras.backend.backend() == "tensorflow":
        from hvdkit.tensorflow.state import beside_keras  # loads TensorFlow

        variables += beside_keras(model)
    rows = [f"{layout(one)} number {place}" for place, one in enumerate(variables)]
    values = {
        row: (value_of(one).astype(np.float64), _rounding_of(one))
        for row, one in zip(rows, variables, strict=True)
        if row in suspects
    }
    return Seen(rows, TRANSPORT.digests(variables), values, rows[:frozen])


def _rounding_of(variable: Any) -> float:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if not keras.backend.is_float_dtype(dtype):
        return 0.0
    return 2.0**-7 if dtype == "bfloat16" else float(np.finfo(dtype).eps) if dtype in _FLOATS else 1.0


def average(values: Mapping[str, Any], size: int) -> dict[str, float]:
    """The inside of ``hvdkit.keras.average_metrics``."""
    return metrics.average(TRANSPORT if size > 1 else None, values, size)


def write_optimizers(file: Path, optimizers: Mapping[str, Any], model: Any) -> None:
    """Write optimizers' variables as an npz file: a single one's in their order, those of several by name.

    Raises:
        OSError: it could not be written.
    """
    values = map(value_of, optimizer_variables(optimizers, model))
    # NumPy's file format does not know bfloat16 and its like (kind V); float32 holds them exactly.
    plain = [value.astype(np.float32) if value.dtype.kind == "V" else value for value in values]
    if list(optimizers) == ["optimizer"]:
        np.savez(file, *plain)
    else:
        np.savez(file, *plain, names=list(optimizers), trained=trained_variables(optimizers, model.weights))


def _stored(
    file: Path, optimizers: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[npt.NDArray[Any]], npt.NDArray[np.int64]]:
    """What ``write_optimizers`` wrote: for which optimizers, the values, and which variables they train."""
    require_stored(file)
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = archive["names"].tolist() if "names" in archive else ["optimizer"]
            trained = archive["trained"] if "trained" in archive else np.zeros((0, 2), np.int64)
            values = [archive[f"arr_{position}"] for position in range(len(set(archive.files) - {"names", "trained"}))]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if names == ["optimizer"] and len(optimizers) > 1:  # of the first alone: older files hold no others
        (name, first), *rest = optimizers.items()
        warnings.warn(f"{file} holds the state of {name} alone; {shown(dict(rest))} begin anew.", stacklevel=2)
        optimizers = {name: first}
    elif set(names) == optimizers.keys():
        optimizers = {name: optimizers[name] for name in names}
    else:
        raise CheckpointError(
            f"{file} holds the states of {', '.join(names)}, and this training has {shown(optimizers)}; restore into "
            "the optimizers that were saved, under the same names."
        )
    return optimizers, values, trained


def read_optimizers(file: Path, optimizers: Mapping[str, Any], model: Any) -> list[tuple[Any, npt.NDArray[Any]]]:
    """What ``write_optimizers`` wrote, each value with its variable; nothing is assigned.

    Of state that is divided among the ranks only what they share; ``read_own_slots`` reads the rest.

    Raises:
        CheckpointError: the file is missing or unreadable, or was written by other optimizers.
    """
    optimizers, values, trained = _stored(file, optimizers)
    make_slots(optimizers, model.weights, trained)
    variables = optimizer_variables(optimizers, model)
    pieces, divided = keras_sharded_files.read_pieces(file.parent), keras_sharded_files.are_divided(optimizers)
    if divided and pieces is None:
        values, _ = keras_sharded_files.split_whole(optimizers, values, str(file))
    if divided or pieces is not None:
        found = keras_sharded_files.matched(keras_sharded_files.shared_of(optimizers), values, str(file))
        return found + ([] if divided else keras_sharded_files.slot_values(optimizers, pieces or {}, str(file)))
    mine, theirs = [tuple(variable.shape) for variable in variables], [value.shape for value in values]
    if mine != theirs:
        raise CheckpointError(
            f"{file} does not fit this {' and '.join(type(one).__name__ for one in optimizers.values())}: it has "
            f"{len(theirs)} variables, {len(mine)} are wanted, or their shapes differ; restore into the optimizer and "
            "model that were saved."
        )
    return list(zip(variables, values, strict=True))


def read_own_slots(file: Path, optimizers: Mapping[str, Any]) -> list[tuple[Any, npt.NDArray[Any]]]:
    """The slots that this rank alone keeps, each with its value; nothing is assigned.

    Raises:
        CheckpointError: as ``read_optimizers``.
    """
    pieces = keras_sharded_files.read_pieces(file.parent)
    if pieces is None:
        optimizers, values, _ = _stored(file, optimizers)
        _, pieces = keras_sharded_files.split_whole(optimizers, values, str(file))
    return keras_sharded_files.slot_values(optimizers, pieces, str(file))


def write_model(directory: Path, model: Any) -> None:
    """Write a model's weights in Keras' own format, and their types and shapes beside it.

    Raises:
        OSError: it could not be written.
    """
    rows = _types_and_shapes(model_variables(model))
    (directory / _LAYOUT).write_text(json.dumps(rows), encoding="utf-8")
    _require_space(directory, model_variables(model))
    try:
        with _said_built(model), by_checkpoints():
            model.save_weights(directory / _WEIGHTS)
    except (RuntimeError, ValueError) as error:  # h5py turns a full disk into one
        raise OSError(" ".join(str(error).split())) from error


def _require_space(directory: Path, variables: Sequence[Any]) -> None:
    """HDF5 may crash a process whose disk is full when a file is closed, so that the job would be told of a SIGSEGV."""
    sizes = [
        math.prod(one.shape) * (2 if one.dtype == "bfloat16" else np.dtype(one.dtype).itemsize) for one in variables
    ]
    if shutil.disk_usage(directory).free < sum(sizes) + _HDF5_FILE + _HDF5_ARRAY * len(sizes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / _WEIGHTS))


def read_model(directory: Path, model: Any) -> None:
    """Load what ``write_model`` wrote.

    Raises:
        CheckpointError: a file cannot be read, or belongs to another model.
    """
    mine = _types_and_shapes(model_variables(model))
    try:
        theirs = json.loads((directory / _LAYOUT).read_text(encoding="utf-8"))
        if mine != theirs:  # load_weights itself would leave out the layers that the model has not
            raise ValueError(f"it holds {len(theirs)} weights, {len(mine)} are wanted, or their shapes differ")
        with _said_built(model), by_checkpoints():
            model.load_weights(directory / _WEIGHTS)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{directory / _WEIGHTS} does not fit this {type(model).__name__}: {reason}") from error


@contextmanager
def _said_built(model: Any) -> Iterator[None]:
    """Keras neither saves nor loads a model that says it is not built, as one without ``call`` always does."""
    said, model.built = model.built, True
    try:
        yield
    finally:
        model.built = said


def _types_and_shapes(variables: Sequence[Any]) -> list[str]:
    return [f"{keras.backend.standardize_dtype(one.dtype)} {tuple(one.shape)}" for one in variables]
