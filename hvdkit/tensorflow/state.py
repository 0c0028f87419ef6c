"""How the state of a TensorFlow training is named, compared and sent; the inside of ``hvdkit.tensorflow``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn
from weakref import WeakSet

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import agreement, passes
from hvdkit.tensorflow import seeds
from hvdkit.tf_shared import keras_optimizer
from hvdkit.tf_shared.keras_layers import generator_states, layers_of, plain_path, untrained_of
from hvdkit.tf_shared.keras_sharded import shared_variables
from hvdkit.tf_shared.tf_ranks import TensorflowRanks

RANKS = TensorflowRanks()
_COUNTED: WeakSet[Any] = WeakSet()


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
                f"{plain_path(variable)} is not TensorFlow's; set KERAS_BACKEND=tensorflow or use hvdkit.keras."
            )
        if inner.dtype == tf.string:
            raise InvalidArgumentError(f"{plain_path(variable)} holds strings, which are not sent between ranks.")
    return variables


def _variables(model: Any, seen: set[int]) -> Iterator[Any]:
    for part in _parts(model, seen):
        if hasattr(part, "assign"):
            yield part
        else:
            for weight in part.weights:
                yield from _parts(weight, seen)
            for variable in beside_keras(part):
                yield from _parts(variable, seen)


def keras_layers(model: Any) -> list[Any]:
    """The outermost Keras layers or models in what ``model_variables`` takes, each once."""
    return [part for part in _parts(model, set()) if not hasattr(part, "assign")]


def generators_of(model: Any) -> list[Any]:
    """The states of the random generators in a model's layers, int (2,) each: (seed, numbers drawn)."""
    return generator_states(keras_layers(model))


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
        "input shape, on every rank first. Of a class that is neither Keras' nor a tf.Module give a list of variables."
    )


def numbered_names(variables: Iterable[Any]) -> list[str]:
    """Names for variables, each once, equal on ranks that have them in the same order."""
    return [f"{plain_path(variable)}.{place}" for place, variable in enumerate(variables)]


def native(variable: Any) -> Any:
    """The ``tf.Variable`` inside a Keras 3 variable; anything else as it is."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def beside_keras(model: Any) -> list[tf.Variable]:
    """Each ``tf.Variable`` of a Keras model that Keras 3 does not count among its weights; none that holds text.

    Args:
        model: a Keras layer or model. Looked through are its layers' attributes, lists and dicts in them, and each
            ``tf.Module`` there.
    """
    known = {id(getattr(weight, "value", None)) for weight in model.weights} | {id(weight) for weight in model.weights}
    found: dict[int, tf.Variable] = {}
    seen: set[int] = set()
    for layer in layers_of(model):
        for name, value in sorted(vars(layer).items()):
            if not name.startswith("_self_"):  # what TensorFlow itself keeps there
                found.update((id(one), one) for one in _held(value, seen))
    return [one for place, one in found.items() if place not in known and one.dtype != tf.string]


def _held(thing: Any, seen: set[int]) -> Iterator[tf.Variable]:
    if isinstance(thing, (Mapping, list, tuple)) and id(thing) not in seen:
        seen.add(id(thing))
        for part in thing.values() if isinstance(thing, Mapping) else thing:
            yield from _held(part, seen)
    elif isinstance(thing, tf.Variable):
        yield thing
    elif isinstance(thing, tf.Module):
        yield from thing.variables


def local_statistics(model: Any) -> list[Any]:
    """The moving statistics that are each rank's own; a list of plain variables has none that could be told."""
    found: dict[int, Any] = {}
    for outer in keras_layers(model):
        for layer in layers_of(outer):
            if isinstance(layer, keras.layers.BatchNormalization):
                found.update((id(one), one) for one in untrained_of(layer))  # without a frozen gamma
    return list(found.values())


def average_statistics(model: Any) -> None:
    """Set BatchNormalization's moving statistics to their mean over the ranks; a collective.

    Before evaluation and before a checkpoint: otherwise both use the statistics of one rank's samples. (The mean of the
    variances leaves out how far the ranks' means are apart, which is little when samples are dealt out at random.)

    Args:
        model: nothing happens where it has none.
    Raises:
        InvalidArgumentError: a model that is not built, or a call inside ``tf.function``.
    """
    require_eager("average_statistics")
    statistics = local_statistics(model)
    if not statistics or hvd.size() == 1:
        return
    sent = [tf.convert_to_tensor(one.value) for one in statistics]
    wide = [tf.cast(one, tf.float64) for one in sent]
    means = hvd.grouped_allreduce(wide, op=hvd.Average, name="hvdkit.statistics")
    for variable, mean in zip(statistics, means, strict=True):
        variable.assign(tf.cast(mean, variable.dtype))


def by_name(optimizer: Any) -> dict[str, Any]:
    """A caller's optimizers by name: one, those of a mapping or a list, or none.

    Raises:
        InvalidArgumentError: not Keras 3 optimizers.
    """
    named = keras_optimizer.by_name(optimizer)
    for one in named.values():
        if not (hasattr(one, "build") and hasattr(one, "built") and hasattr(one, "variables")):
            raise InvalidArgumentError(f"optimizer must be a Keras 3 optimizer, got {type(one).__name__}.")
    return named


def count_steps(optimizer: Any) -> None:
    """Count the steps of optimizers that may never be distributed, nor their tapes, for ``passes``."""
    _COUNTED.update(by_name(optimizer).values())
    passes.expect_steps(_iterations)
    passes.go_on_elsewhere()


def sample_of(model: Any) -> bytes:
    """Some of a model's weights, for ``passes``."""
    weights = [one for one in map(native, model_variables(model)) if one.dtype.is_floating and one.trainable]
    with tf.init_scope():
        rows = [tf.reshape(one, [-1])[-4:].numpy() for one in weights[:: 1 + len(weights) // 32]]
    return b"".join(one.tobytes() for one in rows)


def _iterations() -> int:
    with tf.init_scope():
        return sum(int(native(one.iterations)) for one in _COUNTED)


def trainable_variables(model: Any) -> list[Any]:
    """What a single optimizer trains."""
    return [variable for variable in model_variables(model) if variable.trainable]


def optimizer_variables(optimizer: Any, model: Any) -> list[Any]:
    """The optimizers' counters, learning rates and slots; these are made first where a single one has none yet.

    Raises:
        InvalidArgumentError: not Keras 3 optimizers.
    """
    optimizers = list(by_name(optimizer).values())
    if len(optimizers) == 1 and not optimizers[0].built:
        optimizers[0].build(trainable_variables(model))
    return [variable for one in optimizers for variable in shared_variables(one)]


def layout(variable: Any) -> str:
    """A variable for the comparison of ranks: name, type and shape."""
    return f"{plain_path(variable)} {native(variable).dtype.name} {tuple(variable.shape)}"


def broadcast(model: Any, optimizer: Any | None = None, root: int = 0) -> None:
    """The inside of ``hvdkit.tensorflow.broadcast_state``."""
    require_eager("broadcast_state")
    if not 0 <= root < RANKS.size():
        raise InvalidArgumentError(f"root must be a rank in 0 .. {RANKS.size() - 1}, got {root}.")
    variables = model_variables(model)
    if len(optimizers := by_name(optimizer)) > 1:
        mine = keras_optimizer.trained_variables(optimizers, variables)
        keras_optimizer.make_slots(optimizers, variables, RANKS.allgather(mine, "hvdkit.trained")[root])
    variables += optimizer_variables(optimizers, model)
    agreement.require_same_rows(RANKS, [*map(layout, variables), *keras_optimizer.distributed_rows(optimizers)])
    broadcast_variables(variables, root)
    seeds.move_to_own_stream(generators_of(model))


def broadcast_variables(variables: Iterable[Any], root: int) -> None:
    """Give every rank the root's values, as bytes: exact for every dtype, those that Horovod cannot add up included."""
    RANKS.broadcast_variables(map(native, variables), lambda variable: variable.numpy(), root)
