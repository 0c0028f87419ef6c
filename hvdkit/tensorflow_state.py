"""How the state of a TensorFlow training is named, compared and sent; the inside of ``hvdkit.tensorflow``."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps import agreement, device, metrics
from hvdkit.steps.root import on_root as on_root_of
from hvdkit.steps.topology import Topology
from hvdkit.tensorflow_tape import canonical_name, native

CHUNK = 64 * 2**20  # bytes in one broadcast


def require_eager(what: str) -> None:
    """Raise InvalidArgumentError inside ``tf.function``, where this would run once, while tracing."""
    if not tf.executing_eagerly():
        raise InvalidArgumentError(f"{what} cannot run inside tf.function; call it outside, between the steps.")


def pin(gpus: list[Any], threads: int | None, local_size: int) -> None:
    """Make ``gpus`` the only ones that TensorFlow uses, their memory growing, and limit its threads.

    Raises:
        InvalidArgumentError: TensorFlow has started with other settings.
    """
    try:
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if threads is not None:
            _set_threads(threads)
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"TensorFlow has started with other settings ({error}); call pin_device right after init(), before the "
            "first tensor, variable or model."
        ) from error
    if threads is not None or tf.config.threading.get_intra_op_parallelism_threads() > 0:
        return
    given = os.environ.get("OMP_NUM_THREADS", "")
    try:
        _set_threads(int(given) if given.isdecimal() else device.cpu_threads_here(local_size))
    except RuntimeError:
        warnings.warn(
            "TensorFlow has started already and keeps a thread for every core, on every rank of this host; call "
            "pin_device right after init(), before the first tensor, variable or model.",
            RuntimeWarning,
            stacklevel=3,
        )


def _set_threads(threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def model_variables(model: Any) -> list[Any]:
    """All variables of a model, each once: weights and statistics, not the states of random generators.

    Raises:
        InvalidArgumentError: the model is not built, not TensorFlow's, or holds text.
    """
    variables = list(_collect(model, set()))
    if not variables:
        _raise_not_built(model)
    for variable in variables:
        inner = native(variable)
        if not isinstance(inner, tf.Variable):
            raise InvalidArgumentError(
                f"{canonical_name(variable)} is not TensorFlow's; set KERAS_BACKEND=tensorflow or use hvdkit.keras."
            )
        if inner.dtype == tf.string:
            raise InvalidArgumentError(f"{canonical_name(variable)} holds strings, which are not sent between ranks.")
    return variables


def _collect(thing: Any, seen: set[int]) -> Iterator[Any]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    parts: Iterable[Any]
    if isinstance(thing, Mapping):
        parts = thing.values()
    elif isinstance(thing, (list, tuple)):
        parts = thing
    elif hasattr(thing, "weights") and hasattr(thing, "built"):  # a Keras layer or model
        if not thing.built:
            _raise_not_built(thing)
        parts = thing.weights
    elif isinstance(thing, tf.Module):  # its own `variables` leaves Keras layers out
        parts = [value for name, value in sorted(vars(thing).items()) if not name.startswith("_self_")]
    else:
        if hasattr(thing, "assign") and hasattr(thing, "trainable"):
            yield thing
        return
    for part in parts:
        yield from _collect(part, seen)


def _raise_not_built(model: Any) -> NoReturn:
    raise InvalidArgumentError(
        f"the {type(model).__name__} is not built yet, or has no variables; run one batch through it, or give it an "
        "input shape, on every rank first."
    )


def optimizer_variables(optimizer: Any, model: Any) -> list[Any]:
    """The optimizer's counter, learning rate and slots; the slots are made first where it has none yet.

    Raises:
        InvalidArgumentError: not a Keras 3 optimizer.
    """
    if not (hasattr(optimizer, "build") and hasattr(optimizer, "built") and hasattr(optimizer, "variables")):
        raise InvalidArgumentError(f"optimizer must be a Keras 3 optimizer, got {type(optimizer).__name__}.")
    if not optimizer.built:
        optimizer.build([variable for variable in model_variables(model) if variable.trainable])
    return list(optimizer.variables)


def _layout(variable: Any) -> str:
    return f"{canonical_name(variable)} {native(variable).dtype.name} {tuple(variable.shape)}"


def _numbered(rows: Iterable[str]) -> list[str]:
    return [f"{position} {row}" for position, row in enumerate(rows)]


def require_same_layout(variables: Sequence[Any]) -> None:
    """Raise AgreementError on every rank where names, types or shapes differ between ranks; a collective."""
    rows = [_layout(variable) for variable in variables]
    table = agreement.digest_table({row: () for row in _numbered(rows)})
    difference = agreement.first_difference(gather_tables(table))
    if difference is not None:
        raise agreement.layout_error(difference, rows, hvd.rank())


def broadcast_variables(variables: Sequence[Any], root: int) -> None:
    """Broadcast in place, as bytes: exact for every dtype, those that Horovod cannot add up included."""
    bucket: list[tf.Variable] = []
    size = 0
    for variable in map(native, variables):
        bucket.append(variable)
        size += variable.dtype.size * variable.shape.num_elements()
        if size >= CHUNK:
            _broadcast_bucket(bucket, root)
            bucket, size = [], 0
    if bucket:
        _broadcast_bucket(bucket, root)


def _broadcast_bucket(variables: Sequence[tf.Variable], root: int) -> None:
    arrays = [variable.numpy() for variable in variables]
    received = broadcast_arrays(arrays, root)
    if hvd.rank() != root:
        for variable, array in zip(variables, received, strict=True):
            variable.assign(array)


def broadcast_arrays(arrays: Sequence[Any], root: int) -> list[Any]:
    """The root's values of arrays that have the same shapes and types on all ranks."""
    flat = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
    for start in range(0, len(flat), CHUNK):
        part = slice(start, start + CHUNK)
        flat[part] = hvd.broadcast(flat[part], root, name="hvdkit.broadcast_state").numpy()
    ends = np.cumsum([array.nbytes for array in arrays])
    return [
        part.view(array.dtype).reshape(array.shape)
        for array, part in zip(arrays, np.split(flat, ends[:-1]), strict=True)
    ]


def gather_tables(table: agreement.Digests) -> list[agreement.Digests]:
    """Every rank's digest table, in rank order; tables may differ in length."""
    lengths = hvd.allgather(np.array([len(table)], dtype=np.int64), name="hvdkit.digest_lengths").numpy()
    rows = hvd.allgather(table, name="hvdkit.digests").numpy()
    return [part for part in np.split(rows, np.cumsum(lengths)[:-1])]


def check_agreement(model: Any, optimizer: Any | None) -> None:
    """The inside of ``hvdkit.tensorflow.check_agreement``."""
    variables = model_variables(model)
    if optimizer is not None:
        variables += list(optimizer.variables)
    rows = [_layout(variable) for variable in variables]
    values = [native(variable).numpy() for variable in variables]
    table = agreement.digest_table(dict(zip(_numbered(rows), values, strict=True)))
    difference = agreement.first_difference(gather_tables(table))
    if difference is None:
        return
    if not difference.same_names:
        raise agreement.layout_error(difference, rows, hvd.rank())
    name = getattr(variables[difference.position], "path", None) or variables[difference.position].name
    raise agreement.value_error(difference, name, _largest_difference(values[difference.position]))


def _largest_difference(mine: Any) -> float:
    """The largest absolute difference between any rank's values and the root's; a collective."""
    (root,) = broadcast_arrays([mine], 0)
    largest = math.nan
    if not np.iscomplexobj(mine):
        largest = np.abs(mine.astype(np.float64) - root.astype(np.float64)).max().item()
    return float(hvd.allgather(np.array([largest]), name="hvdkit.difference").numpy().max())


def average(values: Mapping[str, Any], world: Topology) -> dict[str, float]:
    """The inside of ``hvdkit.tensorflow.average_metrics``."""
    pairs = metrics.sums_and_counts(values)
    metrics.require_same_names(gather_tables(metrics.names_table(pairs)), pairs)
    if not pairs:
        return {}
    totals = hvd.allreduce(tf.constant(list(pairs.values()), dtype=tf.float64), op=hvd.Sum, name="hvdkit.metrics")
    return metrics.means(pairs, totals.numpy().tolist(), world.size)


class Warmup:
    """Sets an optimizer's learning rate by the number of steps that it has taken. Made by ``hvdkit.tensorflow.warmup``.

    Args:
        optimizer: a Keras optimizer made with a number as its rate, the scaled one.
        multiplier: of that rate, by the number of steps completed.
    Raises:
        InvalidArgumentError: the optimizer's rate follows a schedule of its own.
    """

    def __init__(self, optimizer: Any, multiplier: Callable[[int], float]) -> None:
        self._optimizer = optimizer
        self._multiplier = multiplier
        self._scaled = float(np.asarray(optimizer.learning_rate))
        self.step()

    def step(self) -> None:
        """Set the rate for the next step; after a restored checkpoint the warmup goes on where it was."""
        require_eager("warmup's step")
        rate = self._scaled * self._multiplier(int(np.asarray(self._optimizer.iterations)))
        try:
            self._optimizer.learning_rate = rate
        except (TypeError, AttributeError):
            raise InvalidArgumentError(
                "the optimizer's learning rate follows a schedule of its own and cannot be set; make it with a number."
            ) from None


def _keyed(variables: Sequence[Any]) -> dict[str, tf.Variable]:
    names = [re.sub(r"[^A-Za-z0-9_]", "_", canonical_name(variable)) for variable in variables]
    return {
        f"{position:05d}_{name}": native(variable)
        for position, (name, variable) in enumerate(zip(names, variables, strict=True))
    }


def write_variables(prefix: Path, variables: Sequence[Any]) -> None:
    """Write variables in TensorFlow's checkpoint format, as PREFIX.index and PREFIX.data-*.

    Raises:
        OSError: TensorFlow could not write.
    """
    try:
        tf.train.Checkpoint(variables=_keyed(variables)).write(str(prefix))
    except tf.errors.OpError as error:
        raise OSError(str(error.message).split("; ")[-1].split(" [Op:")[0]) from error  # "... PATH; No space left ..."


def read_variables(prefix: Path, variables: Sequence[Any], owner: Any) -> list[tuple[tf.Variable, Any]]:
    """The values that ``write_variables`` wrote, each with the variable that it belongs to; nothing is assigned.

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


def on_root(action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0 and give every rank its result or its error; a collective."""

    def broadcast(outcome: Any) -> Any:
        return hvd.broadcast_object(outcome, 0, name="hvdkit.on_root")

    return on_root_of(hvd.rank() == 0, action, broadcast)
