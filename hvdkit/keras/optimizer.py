"""The optimizers of a Keras training: which a model holds, and ``distribute`` over this backend's transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import keras

from hvdkit.errors import InvalidArgumentError
from hvdkit.keras import state
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.outer import OuterOptions, group_of
from hvdkit.tf_shared import keras_optimizer, keras_outer, keras_sharded
from hvdkit.tf_shared.keras_layers import common_names


def distribute(
    optimizer: Any,
    options: GradientOptions,
    process_set: Any,
    outer: OuterOptions | None = None,
    *,
    shard_state: bool = False,
) -> Any:
    """See ``hvdkit.keras.distribute``."""
    keras_optimizer.require_keras_3(optimizer, keras.optimizers.Optimizer, "distribute")
    state.world()
    if options.op == "adasum":
        raise InvalidArgumentError("op='adasum' combines whole updates, which Keras does not expose; use op='average'.")
    steps = None
    if outer is not None:
        process_set = group_of(state.world(), TRANSPORT, process_set, getattr(TRANSPORT, "hvd", None))
        steps = keras_outer.KerasOuterLoop(outer, optimizer, TRANSPORT, common_names)
    reduce, ranks = TRANSPORT.reducer(options, process_set)
    shard = None
    if shard_state and TRANSPORT.size() > 1:
        shard = partial(keras_sharded.shard, rank=TRANSPORT.rank(), size=TRANSPORT.size(), share=TRANSPORT.share)
    return keras_optimizer.distribute_optimizer(optimizer, options, reduce, ranks, steps, shard)


def held_by(model: Any) -> dict[str, Any]:
    """A model's optimizers, each once, by name: ``optimizer`` is that of ``compile``, others the user's attributes.

    One inside another, as in a ``LossScaleOptimizer``, belongs to that one.
    """
    found: dict[int, tuple[str, Any]] = {}
    for name, value in [("optimizer", getattr(model, "optimizer", None)), *vars(model).items()]:
        if not name.startswith("_self_"):  # TensorFlow's own lists of the attributes
            found.update({id(one): (path, one) for path, one in _optimizers_in(name, value) if id(one) not in found})
    inside = {id(inner) for _, one in found.values() for inner in keras_optimizer.inner_optimizers(one)}
    return dict(pair for number, pair in found.items() if number not in inside)


def _optimizers_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _optimizers_in(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _optimizers_in(f"{name}[{place}]", item)


def meant_by(optimizer: Any, model: Any) -> dict[str, Any]:
    """What a caller's ``optimizer`` stands for, that one first: one that the model holds stands for all of them.

    Raises:
        InvalidArgumentError: not a Keras 3 optimizer.
    """
    given = keras_optimizer.by_name(optimizer)
    for one in given.values():
        keras_optimizer.require_keras_3(one, keras.optimizers.Optimizer, "hvdkit.keras")
    if optimizer is None or isinstance(optimizer, (Mapping, list, tuple)):
        return given
    held = held_by(model)
    mine = {name: one for name, one in held.items() if one is optimizer}
    return {**mine, **held} if mine else {**given, **{name: held[name] for name in held if name != "optimizer"}}


def made_by_compile(optimizer: Any) -> bool:
    """Whether this looks like the optimizer that ``compile()`` makes where it is given none."""
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        optimizer = optimizer.inner_optimizer
    plain = keras.optimizers.RMSprop(name=optimizer.name)
    return type(optimizer) is type(plain) and optimizer.get_config() == plain.get_config()
