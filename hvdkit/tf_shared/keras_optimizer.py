"""An optimizer of the user's own Keras 3 class that applies combined gradients; the inside of ``distribute``.

Keras 3 reaches an optimizer in two ways: the TensorFlow and PyTorch trainers through ``apply`` (``apply_gradients``
calls it), the JAX trainer through ``stateless_apply``, which mostly, but not in every class, ends in ``apply``. Both
are replaced, and whichever comes first combines the gradients, once. That is before clipping, accumulation, moving
averages and the overflow test of a loss scale, so that all of them see what one process with the whole batch sees.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.gradients import GradientOptions
from hvdkit.tf_shared.keras_layers import on_host

Reduce = Callable[[list[Any], list[Any]], list[Any]]
_under_way = ContextVar("hvdkit_step_under_way", default=False)


@dataclass(frozen=True, slots=True)
class DistributeOptions:
    """How a distributed optimizer combines gradients.

    Attributes:
        options: the caller's options.
        reduce: gets the gradients, as the trainer made them, None among them, and their variables (None where one
            cannot tell). Returns as many gradients, combined; None where no rank has one. Its ``follow``, where it has
            one, is told for which variables the optimizer is built.
        ranks: the ranks that take part; None: all.
        base: the user's own class.
        outer: takes its outer steps, a ``KerasOuterLoop``; None: it has none.
    """

    options: GradientOptions
    reduce: Reduce
    ranks: tuple[int, ...] | None
    base: type
    outer: Any = None


def distribute_optimizer(
    optimizer: Any,
    options: GradientOptions,
    reduce: Reduce,
    ranks: Sequence[int] | None = None,
    outer: Any = None,
    shard: Callable[[Any], None] | None = None,
) -> Any:
    """Make ``optimizer`` combine gradients before it applies them; returns the same object, its state untouched.

    The object's class becomes a subclass of its own, with the same name for Keras' serialization: a saved model loads
    as if it had never been distributed, and a loaded one is distributed again by one call, slots and all.

    Args:
        optimizer: any Keras 3 optimizer, also one that a model is compiled with already.
        options: see ``GradientOptions``; ``backward_passes_per_step`` must be 1, Keras accumulates by itself.
        reduce: see ``DistributeOptions``; it must be usable where the trainer calls it, inside ``tf.function`` or
            ``jax.jit`` too.
        ranks: see ``DistributeOptions``; for the messages of the checks, ``reduce`` itself decides.
        outer: see there.
        shard: divides the optimizer's state, see ``keras_sharded``.
    Raises:
        InvalidArgumentError: not a Keras 3 optimizer, distributed already, or an option that Keras has itself.
    """
    require_keras_3(optimizer, keras.optimizers.Optimizer, "distribute")
    if options.backward_passes_per_step != 1:
        raise InvalidArgumentError(
            f"backward_passes_per_step={options.backward_passes_per_step} is Keras' own job; make the optimizer with "
            f"gradient_accumulation_steps={options.backward_passes_per_step} instead."
        )
    if is_distributed(optimizer) or any(map(is_distributed, inner_optimizers(optimizer))):
        raise InvalidArgumentError(
            "this optimizer, or one inside it, is distributed already; call distribute once, on the outermost "
            "optimizer, its gradients are averaged."
        )
    if shard is not None:
        shard(optimizer)
    base = type(optimizer)
    members = _overrides(DistributeOptions(options, reduce, None if ranks is None else tuple(ranks), base, outer))
    cls = named_like(base, types.new_class(base.__name__, (base,), exec_body=lambda body: body.update(members)))
    object.__setattr__(optimizer, "__class__", cls)  # past TensorFlow's tracking of attributes
    if optimizer.built and hasattr(reduce, "follow"):
        reduce.follow(optimizer._trainable_variables)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether every gradient that this optimizer applies is combined over the ranks."""
    if hasattr(optimizer, "_hvdkit_distribution"):
        return True
    inner = list(getattr(optimizer, "optimizers", []))  # a MultiOptimizer's
    return bool(inner) and all(map(is_distributed, inner))


def distributed_rows(optimizers: Mapping[str, Any]) -> list[str]:
    """Which optimizers combine their gradients, for the comparison of ranks: one that does alone waits forever."""
    named = [(shown({name: one}), is_distributed(one)) for name, one in optimizers.items()]
    return [f"{name} {'' if distributed else 'not '}distributed" for name, distributed in named]


def is_under_a_distributed_one() -> bool:
    """Whether the step that is being taken is that of a distributed optimizer, whose inner one applies."""
    return _under_way.get()


@contextmanager
def stepping_for_another() -> Iterator[None]:
    """Within, a step is part of a distributed optimizer's."""
    token = _under_way.set(True)
    try:
        yield
    finally:
        _under_way.reset(token)


def taking_part(optimizers: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The ranks whose gradients distributed optimizers combine, the first that not all take part in; None: all."""
    distributions = [getattr(one, "_hvdkit_distribution", None) for one in optimizers.values()]
    return next((one.ranks for one in distributions if one is not None and one.ranks is not None), None)


def by_name(optimizers: Any) -> dict[str, Any]:
    """A caller's optimizers by name: those of a mapping or a list by key or place, a single one as "optimizer"."""
    if isinstance(optimizers, Mapping):
        return {str(name): one for name, one in optimizers.items()}
    if isinstance(optimizers, (list, tuple)):
        return {f"optimizer[{place}]": one for place, one in enumerate(optimizers)}
    return {} if optimizers is None else {"optimizer": optimizers}


def rated(optimizer: Any) -> list[tuple[str, Any]]:
    """The optimizers that have a learning rate: those inside a MultiOptimizer, else the optimizer itself."""
    named = by_name(optimizer).items()
    return [(name, one) for name, outer in named for one in getattr(outer, "optimizers", [outer])]


def rates(optimizer: Any) -> list[float]:
    """The learning rate of an optimizer, or of those of a mapping; of a MultiOptimizer all of them."""
    return [float(on_host(one.learning_rate)) for _, one in rated(optimizer)]


def set_rates(optimizer: Any, rates: list[float]) -> None:
    """Set what ``rates`` returned, but for rates that follow a schedule of the optimizer's own."""
    for (_, one), rate in zip(rated(optimizer), rates, strict=True):
        if any(variable.name == "learning_rate" for variable in one.variables):
            one.learning_rate = rate


def shown(optimizers: Mapping[str, Any]) -> str:
    """Optimizers for a message."""
    return ", ".join(f"{name} ({type(one).__name__})" for name, one in optimizers.items())


def trained_variables(optimizers: Mapping[str, Any], variables: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Which of the variables each optimizer has slots for, (n, 2): place of the optimizer, place of the variable.

    Only the first step says it where there are several: it gives each its own.
    """
    places = {id(variable): place for place, variable in enumerate(variables)}
    pairs = [
        (number, places.get(id(variable), -1))
        for number, optimizer in enumerate(optimizers.values())
        if optimizer.built
        for variable in getattr(optimizer, "_trainable_variables", [])
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def make_slots(optimizers: Mapping[str, Any], variables: Sequence[Any], trained: npt.NDArray[np.int64]) -> None:
    """Give optimizers that have no slots yet those of ``trained_variables``, as they were on another rank or day."""
    for number, optimizer in enumerate(optimizers.values()):
        mine = trained[trained[:, 0] == number, 1].tolist()
        if mine and not optimizer.built and 0 <= min(mine) <= max(mine) < len(variables):
            optimizer.build([variables[place] for place in mine])


def require_slots(optimizers: Mapping[str, Any], what: str) -> None:
    """Raise InvalidArgumentError where one of several optimizers has no slots yet; ``what`` names who needs them."""
    without = {name: one for name, one in optimizers.items() if not one.built}
    if without and len(optimizers) > 1:
        raise InvalidArgumentError(
            f"{what} cannot know which variables {shown(without)} will train; build each for its own first, as in "
            "d_optimizer.build(discriminator.trainable_variables)."
        )


def move_to_loss_scale(optimizer: Any) -> None:
    """Let a ``LossScaleOptimizer`` around a distributed optimizer combine the gradients in its place.

    Keras' ``compile`` wraps an optimizer like this under the policy mixed_float16. The wrapper tests for overflow
    before the inner optimizer is reached: on each rank's own gradients, so that the ranks would decide differently.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is None or is_distributed(optimizer) or not is_distributed(inner):
        return
    distribution: DistributeOptions = inner._hvdkit_distribution
    object.__setattr__(inner, "__class__", distribution.base)
    distribute_optimizer(optimizer, distribution.options, distribution.reduce, distribution.ranks, distribution.outer)


def require_keras_3(thing: Any, wanted: type, what: str) -> None:
    """Raise InvalidArgumentError where ``thing`` is not of the Keras 3 class ``wanted``; ``what`` names the caller."""
    if isinstance(thing, wanted):
        return
    classes = [cls for cls in type(thing).__mro__ if cls.__module__.split(".")[0] == "tf_keras"]
    if classes:
        raise InvalidArgumentError(
            f"{what} needs Keras 3, got the legacy Keras 2 (tf_keras) {classes[0].__name__}; make it with `import "
            "keras` (unset TF_USE_LEGACY_KERAS), or train Keras 2 models with Horovod's own horovod.tensorflow.keras."
        )
    raise InvalidArgumentError(
        f"{what} needs a keras.{wanted.__name__}, got {thing!r} ({type(thing).__name__}); make one, such as "
        f"keras.{'optimizers.SGD(0.01)' if wanted is keras.optimizers.Optimizer else 'Sequential([...])'}."
    )


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers inside a ``LossScaleOptimizer`` or a ``MultiOptimizer``, and inside these."""
    inner = getattr(optimizer, "inner_optimizer", None)
    found = [*([inner] if inner is not None else []), *getattr(optimizer, "optimizers", [])]
    return [*found, *(one for outer in found for one in inner_optimizers(outer))]


def _overrides(distribution: DistributeOptions) -> dict[str, Any]:
    """The members by which the class of a distributed optimizer differs from the user's own."""
    base = distribution.base

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        trainable_variables = None if trainable_variables is None else list(trainable_variables)
        # Given none, Keras takes those for which the optimizer was built.
        variables = trainable_variables or getattr(self, "_trainable_variables", [])
        outermost = distribution.outer is not None and not self.__dict__.get("_hvdkit_applying", False)
        with _combined(self, grads, variables, distribution.reduce) as gradients:
            step = functools.partial(base.apply, self, gradients, trainable_variables)  # type: ignore[attr-defined]
            return distribution.outer.around(self, list(variables), step) if outermost else step()

    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        with _combined(self, grads, list(self._trainable_variables), distribution.reduce) as gradients:
            arguments = self, optimizer_variables, gradients, trainable_variables
            step = functools.partial(base.stateless_apply, *arguments)  # type: ignore[attr-defined]
            if distribution.outer is None:
                return step()
            return distribution.outer.around_stateless(self, trainable_variables, step)

    def build(self: Any, variables: Any) -> None:
        base.build(self, variables)  # type: ignore[attr-defined]
        distribution.reduce.follow(variables)  # type: ignore[attr-defined]

    members: dict[str, Any] = {"apply": apply, "stateless_apply": stateless_apply}
    if hasattr(distribution.reduce, "follow"):
        members["build"] = build
    return {**members, "_hvdkit_distribution": distribution, "__doc__": base.__doc__}


@contextmanager
def _combined(optimizer: Any, grads: Any, variables: list[Any], reduce: Reduce) -> Iterator[list[Any]]:
    """The gradients to apply; inside, the optimizer's other entrance takes them as they are."""
    gradients = list(grads)
    if optimizer.__dict__.get("_hvdkit_applying", False):
        yield gradients
        return
    known = variables if len(variables) == len(gradients) else [None] * len(gradients)
    gradients = reduce(gradients, known)
    optimizer.__dict__["_hvdkit_applying"] = True
    try:
        with stepping_for_another():
            yield gradients
    finally:
        del optimizer.__dict__["_hvdkit_applying"]


def named_like(base: type, cls: type) -> type:
    """Give ``cls`` the identity under which Keras saves an instance of ``base``."""
    cls.__qualname__ = base.__qualname__
    public = getattr(keras.optimizers, base.__name__, None)
    is_kerass_own = base.__module__.startswith("keras.") and isinstance(public, type) and issubclass(base, public)
    cls.__module__ = "keras.optimizers" if is_kerass_own else base.__module__
    registered = keras.saving.get_registered_name(base)
    if registered != base.__name__:
        package, _, name = registered.rpartition(">")
        plain = keras.saving.get_custom_objects().get(registered, base)
        keras.saving.register_keras_serializable(package, name)(cls)
        keras.saving.get_custom_objects()[registered] = plain  # loading gives the user's class, as everywhere else
    return cls
