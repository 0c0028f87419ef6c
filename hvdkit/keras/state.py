"""How the state of a Keras 3 training is named, compared, sent and saved; the inside of ``hvdkit.keras``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.common.keras_optimizer import require_keras_3
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps import agreement, metrics
from hvdkit.steps.topology import Topology

_WEIGHTS, _LAYOUT = "model.weights.h5", "model.layout.json"
_started: list[Topology] = []


def start() -> Topology:
    """Start the communication library, where it is not running, and remember this process's place."""
    _started[:] = [TRANSPORT.start()]
    return _started[0]


def follow(new: Topology) -> Topology:
    """Remember this process's place after ranks have come or gone."""
    _started[:] = [new]
    return new


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
    if not model.built:
        raise InvalidArgumentError(
            f"the model {model.name!r} is not built yet, so it has no weights to send or compare; give it a "
            "keras.Input, or call it on one batch, on every rank first."
        )
    return list(model.weights)


def optimizer_variables(optimizer: Any, model: Any) -> list[Any]:
    """Counter, learning rate and slots of an optimizer; the slots are made first where it has none yet."""
    require_keras_3(optimizer, keras.optimizers.Optimizer, "hvdkit.keras")
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return list(optimizer.variables)


def values_of(variables: Iterable[Any]) -> list[npt.NDArray[Any]]:
    """Values on the host, in the variables' own types and shapes."""
    return list(map(value_of, variables))


def value_of(variable: Any) -> npt.NDArray[Any]:
    """A value on the host, in the variable's own type and shape."""
    return np.asarray(keras.ops.convert_to_numpy(variable), order="C")


def number(value: Any) -> float:
    """A scalar tensor, variable or number as a float."""
    return float(np.asarray(keras.ops.convert_to_numpy(value)))


def layout(variable: Any) -> str:
    """Path without automatic numbers, type and shape: equal on ranks that have built other layers before."""
    path = re.sub(r"_\d+(?=[/_]|$)", "", variable.path)
    return f"{path} {keras.backend.standardize_dtype(variable.dtype)} {tuple(variable.shape)}"


def require_same_layout(variables: Sequence[Any]) -> None:
    """Raise AgreementError on every rank unless the variables have the same paths, types and shapes; a collective."""
    agreement.require_same_rows(TRANSPORT, [layout(variable) for variable in variables])


def broadcast(variables: Sequence[Any], source: int) -> None:
    """Give every rank the root's values, as bytes: exact for every dtype."""
    TRANSPORT.broadcast_variables(variables, value_of, source)


def average_statistics(variables: Sequence[Any]) -> None:
    """Set floating variables that differ between ranks to their mean over the ranks; a collective."""
    table = agreement.value_table(
        [one.path for one in variables], [agreement.digest(value_of(one)) for one in variables]
    )
    tables = np.stack(TRANSPORT.gather(table, "hvdkit.statistics"))
    differs = (tables[:, :, 1] != tables[0, :, 1]).any(axis=0)
    for variable in (variables[position] for position in np.flatnonzero(differs).tolist()):
        if keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype)):
            (mine,) = values_of([variable])
            total = TRANSPORT.sum(mine.astype(np.float64), "hvdkit.statistics")
            variable.assign((total / world().size).astype(mine.dtype))


def average(values: Mapping[str, Any], size: int) -> dict[str, float]:
    """The inside of ``hvdkit.keras.average_metrics``."""
    return metrics.average(TRANSPORT if size > 1 else None, values, size)


def require_same_names(values: Iterable[str]) -> None:
    """Raise AgreementError on every rank unless all give the same names of metrics."""
    names = {name: (0.0, 0.0) for name in sorted(values)}
    metrics.require_same_names(TRANSPORT.gather(metrics.names_table(names), "hvdkit.metric_names"), names)


def same_names(values: Iterable[str]) -> bool:
    """Whether all ranks give the same names, the same answer on every rank; a collective."""
    table = metrics.names_table(dict.fromkeys(sorted(values), (0.0, 0.0)))
    return agreement.agree([table], lambda mine: TRANSPORT.minimum(mine, "hvdkit.metric_names"))


def write_optimizer(file: Path, optimizer: Any, model: Any) -> None:
    """Write an optimizer's variables as an npz file, in their order.

    Raises:
        OSError: it could not be written.
    """
    values = values_of(optimizer_variables(optimizer, model))
    # NumPy's file format does not know bfloat16 and its like (kind V); float32 holds them exactly.
    np.savez(file, *[value.astype(np.float32) if value.dtype.kind == "V" else value for value in values])


def read_optimizer(file: Path, optimizer: Any, model: Any) -> list[tuple[Any, npt.NDArray[Any]]]:
    """What ``write_optimizer`` wrote, each value with its variable; nothing is assigned.

    Raises:
        CheckpointError: the file is missing or unreadable, or was written by another optimizer.
    """
    variables = optimizer_variables(optimizer, model)
    try:
        with np.load(file, allow_pickle=False) as archive:
            values = [archive[f"arr_{position}"] for position in range(len(archive.files))]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    mine, theirs = [tuple(variable.shape) for variable in variables], [value.shape for value in values]
    if mine != theirs:
        raise CheckpointError(
            f"{file} does not fit this {type(optimizer).__name__}: it has {len(theirs)} variables, {len(mine)} are "
            "wanted, or their shapes differ; restore into the optimizer and model that were saved."
        )
    return list(zip(variables, values, strict=True))


def write_model(directory: Path, model: Any) -> None:
    """Write a model's weights in Keras' own format, and their types and shapes beside it.

    Raises:
        OSError: it could not be written.
    """
    rows = _types_and_shapes(model_variables(model))
    (directory / _LAYOUT).write_text(json.dumps(rows), encoding="utf-8")
    try:
        model.save_weights(directory / _WEIGHTS)
    except (RuntimeError, ValueError) as error:  # h5py turns a full disk into one
        raise OSError(" ".join(str(error).split())) from error


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
        model.load_weights(directory / _WEIGHTS)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{directory / _WEIGHTS} does not fit this {type(model).__name__}: {reason}") from error


def _types_and_shapes(variables: Sequence[Any]) -> list[str]:
    return [f"{keras.backend.standardize_dtype(one.dtype)} {tuple(one.shape)}" for one in variables]
