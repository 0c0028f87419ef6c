"""How the state of a TensorFlow training is named, compared and sent; the inside of ``hvdkit.tensorflow``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import agreement, metrics
from hvdkit.steps.root import on_root as on_root_of
from hvdkit.steps.topology import Topology
from hvdkit.tensorflow import seeds
from hvdkit.tensorflow.optimizer import canonical_name, native

CHUNK = 64 * 2**20  # bytes in one broadcast


def require_eager(what: str) -> None:
    """Raise InvalidArgumentError inside ``tf.function``, where this would run once, while tracing."""
    if not tf.executing_eagerly():
        raise InvalidArgumentError(f"{what} cannot run inside tf.function; call it outside, between the steps.")


def model_variables(model: Any) -> list[Any]:
    """All variables of a model, each once: weights and statistics, not the states of random generators.

    Raises:
        InvalidArgumentError: the model is not built, not TensorFlow's, or holds text.
    """
    variables = list(_variables(model, set()))
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


def _variables(model: Any, seen: set[int]) -> Iterator[Any]:
    for part in _parts(model, seen):
        if hasattr(part, "assign"):
            yield part
        else:
            for weight in part.weights:
                yield from _parts(weight, seen)


def keras_layers(model: Any) -> list[Any]:
    """The outermost Keras layers or models in what ``model_variables`` takes, each once."""
    return [part for part in _parts(model, set()) if not hasattr(part, "assign")]


def generator_states(model: Any) -> list[Any]:
    """The states of the random generators in a model's layers, int (2,) each: (seed, numbers drawn)."""
    layers = keras_layers(model)
    weights = {id(weight) for layer in layers for weight in layer.weights}
    states = {id(one): one for layer in layers for one in layer.variables if id(one) not in weights}
    return list(states.values())


def _parts(thing: Any, seen: set[int]) -> Iterator[Any]:
    """The Keras layers and the variables in a structure, each once."""
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
        yield thing
        return
    elif isinstance(thing, tf.Module):  # its own `variables` leaves Keras layers out
        parts = [value for name, value in sorted(vars(thing).items()) if not name.startswith("_self_")]
    else:
        if hasattr(thing, "assign") and hasattr(thing, "trainable"):
            yield thing
        return
    for part in parts:
        yield from _parts(part, seen)


def _raise_not_built(model: Any) -> NoReturn:
    raise InvalidArgumentError(
        f"the {type(model).__name__} is not built yet, or has no variables; run one batch through it, or give it an "
        "input shape, on every rank first."
    )


def require_keras_optimizer(optimizer: Any) -> None:
    """Raise InvalidArgumentError where ``optimizer`` is not one of Keras 3."""
    if not (hasattr(optimizer, "build") and hasattr(optimizer, "built") and hasattr(optimizer, "variables")):
        raise InvalidArgumentError(f"optimizer must be a Keras 3 optimizer, got {type(optimizer).__name__}.")


def optimizer_variables(optimizer: Any, model: Any) -> list[Any]:
    """The optimizer's counter, learning rate and slots; the slots are made first where it has none yet.

    Raises:
        InvalidArgumentError: not a Keras 3 optimizer.
    """
    require_keras_optimizer(optimizer)
    if not optimizer.built:
        optimizer.build([variable for variable in model_variables(model) if variable.trainable])
    return list(optimizer.variables)


def layout(variable: Any) -> str:
    """A variable for the comparison of ranks: name, type and shape."""
    return f"{canonical_name(variable)} {native(variable).dtype.name} {tuple(variable.shape)}"


def _numbered(rows: Iterable[str]) -> list[str]:
    return [f"{position} {row}" for position, row in enumerate(rows)]


def require_same_layout(variables: Sequence[Any]) -> None:
    """Raise AgreementError on every rank where names, types or shapes differ between ranks; a collective."""
    rows = [layout(variable) for variable in variables]
    table = agreement.digest_table({row: () for row in _numbered(rows)})
    difference = agreement.first_difference(gather_tables(table))
    if difference is not None:
        raise agreement.layout_error(difference, rows, hvd.rank())


def broadcast(model: Any, optimizer: Any | None = None, root: int = 0) -> None:
    """The inside of ``hvdkit.tensorflow.broadcast_state``."""
    require_eager("broadcast_state")
    if not 0 <= root < hvd.size():
        raise InvalidArgumentError(f"root must be a rank in 0 .. {hvd.size() - 1}, got {root}.")
    variables = model_variables(model)
    if optimizer is not None:
        variables += optimizer_variables(optimizer, model)
    require_same_layout(variables)
    broadcast_variables(variables, root)
    seeds.move_to_own_stream(generator_states(model))


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


def average(values: Mapping[str, Any], world: Topology) -> dict[str, float]:
    """The inside of ``hvdkit.tensorflow.average_metrics``."""
    pairs = metrics.sums_and_counts(values)
    metrics.require_same_names(gather_tables(metrics.names_table(pairs)), pairs)
    if not pairs:
        return {}
    totals = hvd.allreduce(tf.constant(list(pairs.values()), dtype=tf.float64), op=hvd.Sum, name="hvdkit.metrics")
    return metrics.means(pairs, totals.numpy().tolist(), world.size)


def on_root(action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0 and give every rank its result or its error; a collective."""

    def broadcast(outcome: Any) -> Any:
        return hvd.broadcast_object(outcome, 0, name="hvdkit.on_root")

    return on_root_of(hvd.rank() == 0, action, broadcast)
