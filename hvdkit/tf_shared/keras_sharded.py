"""State of a Keras 3 optimizer divided among the ranks (``distribute(shard_state=True)``, ZeRO stage 1).

An optimizer is built for this rank's pieces alone: for a variable itself, or, where it is cut, for a flat variable that
stands in for its numbers. Keras calls ``_backend_apply_gradients`` in every step, on each backend, eagerly and in
graphs; there the mean gradients are clipped whole, those of the own pieces are applied, and owners give to all ranks
what their pieces have become. The rest of Keras sees an optimizer that was built for all variables.
"""

from __future__ import annotations

import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.shard_state import Piece, divide
from hvdkit.tf_shared.keras_layers import on_host
from hvdkit.tf_shared.keras_optimizer import named_like, stepping_for_another

Array = npt.NDArray[Any]
Share = Callable[[list[Any], list[int], str], list[Any]]
_ATTRIBUTE = "_hvdkit_shards"
_LISTS = ("_trainable_variables", "_trainable_variables_indices")
_STORE = "_variables"
_NUMBERS = itertools.count()
_BY_CHECKPOINTS = ContextVar("hvdkit_by_checkpoints", default=False)


# Which optimizers ----------------------------------------------------------------------------------------------------


def shard(optimizer: Any, *, rank: int, size: int, share: Share) -> None:
    """Divide the state of an optimizer, and of those inside it, that is about to be distributed.

    Args:
        rank, size: this process among all.
        share: gets what pieces are here (flat), the rank that owns each, and a name; returns the owners'. A collective.
    Raises:
        InvalidArgumentError: one whose updates, settings or state cannot be divided.
    """
    leaves = leaves_of(optimizer)
    if not leaves:
        raise InvalidArgumentError(
            f"shard_state=True got a {type(optimizer).__name__} that makes its optimizers later; give it a "
            "keras.optimizers.OptimizerMap, or build it before distribute."
        )
    if keras.backend.backend() == "tensorflow":
        from hvdkit.tf_shared import tf_ranks  # loads TensorFlow

        tf_ranks.IN_ANY_GRAPH["ignore_name_scope"] = True
    may_cut = [_may_be_cut(leaf) for leaf in leaves]  # all of them, before anything is changed
    for leaf, cuts in zip(leaves, may_cut, strict=True):
        _shard(leaf, Shards(type(leaf), rank, size, share, cuts))


def leaves_of(optimizer: Any) -> list[Any]:
    """The optimizers that keep slots: this one, or those inside it."""
    if hasattr(optimizer, "inner_optimizer"):
        return leaves_of(optimizer.inner_optimizer)
    return list(optimizer.optimizers) if hasattr(optimizer, "optimizers") else [optimizer]


def _shard(optimizer: Any, shards: Shards) -> None:
    base, built = type(optimizer), optimizer.built
    if built:
        variables = list(optimizer._trainable_variables)
        shared = [np.array(on_host(one)) for one in _shared_by_variables(optimizer)]
        kept = slots_of(optimizer).items()
        slots = {name: [None if one is None else np.array(on_host(one)) for one in of_all] for name, of_all in kept}
    cls = named_like(base, types.new_class(base.__name__, (base,), exec_body=lambda body: body.update(_members(base))))
    object.__setattr__(optimizer, "__class__", cls)
    optimizer.__dict__[_ATTRIBUTE] = shards
    if built:
        shards.rebuild(optimizer, variables, slots, shared)


def _shared_by_variables(optimizer: Any) -> list[Any]:
    """What an optimizer keeps beside slots, iterations and learning rate, in its order."""
    own = set(map(id, (*slot_variables(optimizer), optimizer._iterations, optimizer._learning_rate)))
    return [one for one in optimizer.variables if id(one) not in own]


def shards_of(optimizer: Any) -> Shards | None:
    """How the state of an optimizer is divided that has no other inside; None: it is whole."""
    shards: Shards | None = optimizer.__dict__.get(_ATTRIBUTE)
    return shards


def shards_in(optimizer: Any) -> list[Any]:
    """The optimizers in one, or that one, whose state is divided."""
    return [leaf for leaf in leaves_of(optimizer) if shards_of(leaf) is not None]


def shared_variables(optimizer: Any) -> list[Any]:
    """An optimizer's variables, but for those that this rank alone keeps."""
    own = {id(slot) for leaf in shards_in(optimizer) for slot in slot_variables(leaf)}
    return [variable for variable in optimizer.variables if id(variable) not in own]


def slots_of(optimizer: Any) -> dict[str, list[Any]]:
    """An optimizer's slots by attribute: a list with one for each variable that it was built for, or None.

    It is what ``_get_variable_index`` is for in every optimizer of Keras, and in those that follow its guide.
    """
    shards = shards_of(optimizer)
    n_variables = len(optimizer._trainable_variables if shards is None else shards.own)
    return {
        name: list(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and name not in (*_LISTS, _STORE) and len(value) == n_variables > 0
        if any(isinstance(one, keras.Variable) for one in value)
        and all(one is None or isinstance(one, keras.Variable) for one in value)
    }


def slot_variables(optimizer: Any) -> list[Any]:
    """All slots of one optimizer that has no other inside."""
    return [one for slots in slots_of(optimizer).values() for one in slots if one is not None]


def refuse_elastic(optimizers: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError where the state of one of these is divided: a lost rank's is lost."""
    for name, one in optimizers.items():
        if shards_in(one):
            raise InvalidArgumentError(
                f"with shard_state=True a rank that is lost takes its part of the state of {name} along; leave it out, "
                "or train without ElasticState and go on from Checkpoints."
            )


@contextmanager
def by_checkpoints() -> Iterator[None]:
    """Within, Keras writes and reads weights for ``Checkpoints``, which keep the state of optimizers themselves."""
    token = _BY_CHECKPOINTS.set(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            yield
    finally:
        _BY_CHECKPOINTS.reset(token)


_TRIED = {
    "learning_rate": 0.05,
    "gradient_accumulation_steps": None,
    "use_ema": False,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
}
"""Settings of an optimizer that is tried; all others are the user's."""
_SIZES, _STEPS = ((96, 96), (40,), (2, 3, 8)), 3
_TOLERANCE = 1e-4  # several orders below what another norm makes of a step


def _may_be_cut(optimizer: Any) -> bool:
    """Whether an optimizer updates each number by itself; found by trying it on a few tensors.

    Raises:
        InvalidArgumentError: it looks at several variables at once, or cannot be tried.
    """
    name = type(optimizer).__name__
    if (optimizer.clipnorm or optimizer.global_clipnorm) and optimizer.gradient_accumulation_steps:
        raise InvalidArgumentError(
            f"shard_state=True cannot clip by a norm what {name} accumulates, of which each rank has a part; leave "
            "gradient_accumulation_steps out, or clip with clipvalue=."
        )
    draw = np.random.default_rng(5)
    tensors = []
    for shape in _SIZES:
        size = int(np.prod(shape))
        uneven = np.where(np.arange(size) < size // 2, 1.0, 30.0)
        rows = [draw.normal(size=size), *(draw.normal(size=size) * uneven * scale for scale in (1.0, 20.0, 0.2))]
        tensors.append(np.stack(rows).astype(np.float32).reshape(1 + _STEPS, *shape))
    first, second, third = tensors
    flat, cut = first.reshape(1 + _STEPS, -1), 4000
    try:
        whole, (known,) = _after_steps(optimizer, [tensors])
        apart, known_alone = _after_steps(optimizer, [[first], [second], [third]])
        pieces = [[flat[:, :cut]], [flat[:, cut:], second[:, :13]], [second[:, 13:], third.reshape(1 + _STEPS, -1)]]
        in_pieces, known_of_pieces = _after_steps(optimizer, pieces)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"shard_state=True tries a {name} made by {name}.from_config(get_config()) on small tensors, and this one "
            f"failed ({type(error).__name__}: {error}); mend these, or leave shard_state out."
        ) from error
    for found, others, may_be_cut in ((in_pieces, known_of_pieces, True), (apart, known_alone, False)):
        same = all(one.shape == known.shape and np.allclose(one, known) for one in others)
        if same and np.allclose(found, whole, rtol=_TOLERANCE, atol=_TOLERANCE):
            return may_be_cut
    raise InvalidArgumentError(
        f"shard_state=True cannot divide the state of {name}: it updates a variable by what it knows of others; leave "
        "shard_state out."
    )


def _after_steps(optimizer: Any, groups: list[list[Array]]) -> tuple[Array, list[Array]]:
    """What tensors become, each group with an optimizer like the user's of its own; and what each knows of all."""
    cls, found, known = type(optimizer), [], []
    for group in groups:
        config = optimizer.get_config()
        one = cls.from_config({**config, **{key: value for key, value in _TRIED.items() if key in config}})
        one.__dict__["_clip_gradients"] = lambda gradients: gradients  # which are clipped before they are cut
        variables = [keras.Variable(rows[0], dtype="float32", name="tried", trainable=False) for rows in group]
        one.build(variables)
        slots, own = slots_of(one), set(map(id, slot_variables(one)))
        if any(_is_copy(slot, variables) for kept in slots.values() for slot in kept if slot is not None):
            raise InvalidArgumentError(
                f"shard_state=True cannot divide the state of {cls.__name__}, which begins as a copy of the weights: "
                "broadcast_state would change these alone; leave shard_state out."
            )
        applied: list[int] = []
        plain = one._backend_apply_gradients
        one.__dict__["_backend_apply_gradients"] = lambda *given, plain=plain, to=applied: (to.append(1), plain(*given))
        for step in range(_STEPS):
            with stepping_for_another(), _without_autograd():
                one.apply([keras.ops.convert_to_tensor(rows[1 + step]) for rows in group], variables)
        if len(applied) != _STEPS:
            raise InvalidArgumentError(
                f"shard_state=True divides what Keras' own Optimizer.apply updates, and {cls.__name__} has one of its "
                "own; leave shard_state out."
            )
        found += [on_host(variable).reshape(-1) for variable in variables]
        shared = [on_host(variable).reshape(-1) for variable in one.variables if id(variable) not in own]
        known.append(np.concatenate([part.astype(np.float64) for part in shared]))
    return np.concatenate(found), known


def _is_copy(slot: Any, variables: Sequence[Any]) -> bool:
    return any(tuple(slot.shape) == tuple(v.shape) and np.array_equal(on_host(slot), on_host(v)) for v in variables)


def _without_autograd() -> AbstractContextManager[Any]:
    if keras.backend.backend() != "torch":
        return nullcontext()
    import torch

    no_grad: AbstractContextManager[Any] = torch.no_grad()
    return no_grad


# One optimizer -------------------------------------------------------------------------------------------------------


class Shards:
    """How the state of one optimizer is divided, and its steps.

    Args:
        base: the user's class.
        rank, size, share: see ``shard``.
        may_cut: whether variables may be cut.
    Attributes:
        variables: all that the optimizer trains.
        pieces: of these.
        own: this rank's pieces, each with the variable that the optimizer was built for; the last, of no piece, is
            what a rank updates that has nothing to update, so that what all share goes on alike.
    """

    def __init__(self, base: type, rank: int, size: int, share: Share, may_cut: bool) -> None:
        self._base, self._rank, self._size, self._share, self._may_cut = base, rank, size, share, may_cut
        self.variables: list[Any] = []
        self.pieces: list[Piece] = []
        self.own: list[tuple[Piece | None, Any]] = []
        self._lists: dict[str, Any] = {}
        self._whole_of: dict[Any, Any] = {}
        self._name = ""

    # Division -------------------------------------------------------------------------------------------------------

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer for this rank's pieces of the variables."""
        self.variables = list(variables)
        for variable in self.variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise InvalidArgumentError(
                    f"shard_state=True cannot divide {variable.path}, which float8 overwrites with its gradient; leave "
                    "shard_state out."
                )
        sizes = [int(np.prod(variable.shape)) for variable in self.variables]
        self.pieces = divide(sizes, self._size, () if self._may_cut else range(len(sizes)))
        mine = [piece for piece in self.pieces if piece.owner == self._rank]
        self.own = [(piece, _stand_in(piece, self.variables[piece.place])) for piece in mine]
        spare = keras.Variable(
            initializer="zeros",
            shape=(1,),
            dtype=keras.backend.standardize_dtype(self.variables[0].dtype) if self.variables else None,
            trainable=False,
            name="spare",
        )
        self.own.append((None, spare))
        self._base.build(optimizer, [one for _, one in self.own])  # type: ignore[attr-defined]
        self._lists = {name: optimizer.__dict__[name] for name in _LISTS}
        places = {optimizer._var_key(one): place for place, one in enumerate(self.variables)}
        optimizer.__dict__.update(dict(zip(_LISTS, (self.variables[:], places), strict=True)))
        self._whole_of = {optimizer._var_key(one): self.variables[p.place] for p, one in self.own if p is not None}

    def rebuild(
        self, optimizer: Any, variables: list[Any], slots: dict[str, list[Array | None]], shared: list[Array]
    ) -> None:
        """Divide an optimizer that was built for all variables, and keep this rank's part of its state.

        Args:
            variables: for which it was built.
            slots: by attribute, a value for each variable.
            shared: the values of ``_shared_by_variables``.
        """
        for variable in optimizer.variables:
            if variable is not optimizer._iterations and variable is not optimizer._learning_rate:
                optimizer._untrack_variable(variable)
        optimizer.__dict__["_trainable_variables_indices"] = {}
        optimizer.built = False
        optimizer.build(variables)
        for variable, value in zip(_shared_by_variables(optimizer), shared, strict=True):
            variable.assign(value)
        for name, kept in slots_of(optimizer).items():
            for (piece, _), slot in zip(self.own, kept, strict=True):
                whole = None if piece is None else slots[name][piece.place]
                if piece is not None and slot is not None and whole is not None:
                    cut = piece.cut and whole.size == int(np.prod(variables[piece.place].shape))
                    slot.assign(whole.reshape(-1)[piece.start : piece.stop] if cut else whole)

    def outline(self, optimizer: Any) -> Any:
        """An optimizer like this one, built for all variables, whose slots hold nothing."""
        cls: Any = self._base
        one = cls.from_config(optimizer.get_config())

        def add_variable(shape: Any, *_: Any, **__: Any) -> Any:  # noqa: ARG001
            slot = keras.Variable(0.0, dtype="float32", trainable=False, name="outline")
            one._track_variable(slot)
            return slot

        one.__dict__["add_variable"] = add_variable
        one.build(self.variables)
        return one

    def whole_of(self, optimizer: Any, variable: Any) -> Any:
        """The variable for which one stands in, as Keras' backend has it."""
        whole = self._whole_of.get(optimizer._var_key(variable))
        if whole is None:
            return variable
        return whole if isinstance(variable, keras.Variable) else getattr(whole, "value", whole)

    # A step ---------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Update this rank's pieces, and have all ranks get all pieces."""
        clips_here = not optimizer.gradient_accumulation_steps
        if clips_here:
            gradients = self._base._clip_gradients(optimizer, gradients)  # type: ignore[attr-defined]
        places = optimizer._trainable_variables_indices
        keys = [places[optimizer._var_key(variable)] for variable in variables]
        given = dict(zip(keys, gradients, strict=True))
        touched = range(len(self.variables)) if optimizer.use_ema else given
        mine = [(piece, one) for piece, one in self.own if piece is not None and piece.place in given]
        self._take_in(touched)
        updated = [one for _, one in mine]
        applied = [_part(given[piece.place], piece) if piece.cut else given[piece.place] for piece, _ in mine]
        if not updated:
            updated = [self.own[-1][1]]
            applied = [keras.ops.zeros((1,), dtype=updated[0].dtype)]
        with self.inside(optimizer, clips=not clips_here):
            self._base._backend_apply_gradients(optimizer, applied, updated)  # type: ignore[attr-defined]
        self._give(touched)

    def finalize(self, optimizer: Any) -> None:
        """Have the variables be their moving averages, as Keras does at the end of ``fit``; a collective."""
        everything = range(len(self.variables))
        self._take_in(everything)
        with self.inside(optimizer):
            self._base.finalize_variable_values(optimizer, [one for _, one in self.own])  # type: ignore[attr-defined]
        self._give(everything)

    @contextmanager
    def inside(self, optimizer: Any, clips: bool = True) -> Iterator[None]:
        """Within, the optimizer is what it was built as: one for this rank's pieces."""
        held = {name: optimizer.__dict__[name] for name in _LISTS}
        optimizer.__dict__.update(self._lists)
        if not clips:
            optimizer.__dict__["_clip_gradients"] = lambda gradients: gradients
        try:
            yield
        finally:
            optimizer.__dict__.update(held)
            optimizer.__dict__.pop("_clip_gradients", None)

    def _take_in(self, places: Any) -> None:
        for piece, one in self.own:
            if piece is not None and piece.cut and piece.place in places:
                one.assign(_part(self.variables[piece.place], piece))

    def _give(self, places: Any) -> None:
        self._name = self._name or f"hvdkit.shard_state.keras.{next(_NUMBERS)}"
        stand_ins = {piece: one for piece, one in self.own if piece is not None and piece.cut}
        sent = [piece for piece in self.pieces if piece.place in places]
        tensors = [
            _flat(stand_ins[piece]) if piece in stand_ins else _part(self.variables[piece.place], piece)
            for piece in sent
        ]
        received = self._share(tensors, [piece.owner for piece in sent], self._name)
        for place, group in itertools.groupby(zip(sent, received, strict=True), key=lambda one: one[0].place):
            parts, variable = [tensor for _, tensor in group], self.variables[place]
            joined = parts[0] if len(parts) == 1 else keras.ops.concatenate(parts)
            variable.assign(keras.ops.reshape(joined, variable.shape))


def _stand_in(piece: Piece, variable: Any) -> Any:
    if not piece.cut:
        return variable
    name = getattr(variable, "path", variable.name)
    stand_in = keras.Variable(
        initializer="zeros",
        shape=(piece.stop - piece.start,),
        dtype=keras.backend.standardize_dtype(variable.dtype),
        trainable=False,
        name=re.sub(r"[/:]", "_", variable.name),
    )
    stand_in._path = name  # by which programs tell variables from others
    return stand_in


def _flat(value: Any) -> Any:
    return keras.ops.reshape(keras.ops.convert_to_tensor(value), (-1,))


def _part(value: Any, piece: Piece) -> Any:
    return _flat(value)[piece.start : piece.stop] if piece.cut else _flat(value)


def _members(base: Any) -> dict[str, Any]:
    """The members by which the class of an optimizer whose state is divided differs from the user's own."""

    def build(self: Any, variables: Any) -> None:
        if not self.built:
            self._hvdkit_shards.build(self, variables)

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        with _without_autograd():
            self._hvdkit_shards.step(self, grads, trainable_variables)

    def _use_weight_decay(self: Any, variable: Any) -> bool:
        decays: bool = base._use_weight_decay(self, self._hvdkit_shards.whole_of(self, variable))
        return decays

    def _apply_weight_decay(self: Any, variables: Any) -> None:
        if any(self._use_weight_decay(one) for one in variables):  # torch takes no empty list
            base._apply_weight_decay(self, variables)

    def finalize_variable_values(self: Any, var_list: Any) -> None:  # noqa: ARG001
        if self.use_ema:
            with _without_autograd():
                self._hvdkit_shards.finalize(self)

    def save_own_variables(self: Any, store: Any) -> None:  # noqa: ARG001
        if _BY_CHECKPOINTS.get():
            return
        warnings.warn(
            f"Keras saves no state of this {base.__name__}, of which each rank has a part (shard_state=True): what is "
            "loaded begins anew. To go on with it, save by hvdkit's Checkpoints.",
            stacklevel=2,
        )

    def load_own_variables(self: Any, store: Any) -> None:  # noqa: ARG001
        if len(store.keys()) and not _BY_CHECKPOINTS.get():
            raise InvalidArgumentError(
                f"a file of Keras' holds the whole state of a {base.__name__}, and each rank keeps a part of it "
                "(shard_state=True); load it before distribute, or restore from hvdkit's Checkpoints."
            )

    functions = (
        build,
        _backend_apply_gradients,
        _use_weight_decay,
        _apply_weight_decay,
        finalize_variable_values,
        save_own_variables,
        load_own_variables,
    )
    return {"__doc__": base.__doc__, **{function.__name__: function for function in functions}}
