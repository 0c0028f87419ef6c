"""The mean over the ranks, and ZeRO stage 1, as transformations of optax: pure functions, for JAX.

What ``jax.jit`` compiles hands arrays to the host by an ordered callback: every rank averages step after step, and the
compiler may neither drop nor repeat one. It runs behind the program. Whatever else of hvdkit asks the ranks waits for
it, since MPI's calls pair up in their order.

Whether a transformation may have its parameters cut, or needs whole ones, is tried out on small arrays in the
parameters' containers: the updates and the state must be what they are without a division.
"""

from __future__ import annotations

import atexit
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import io_callback

from hvdkit.arrays import exit_watchdog, mpi, tree
from hvdkit.arrays.optimizer import Reduce
from hvdkit.arrays.sharded import ShardedState
from hvdkit.arrays.tree import OwnState
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import agreement, passes
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.topology import Topology

_reductions: dict[Any, Reduce] = {}
"""By what is averaged, and how. A factory within ``optax.inject_hyperparams`` calls ``average`` in every step."""


@functools.cache
def comm() -> Any:
    """The communicator on which all of these reductions begin; made in the first thread, on every rank."""
    mpi.before_calls.append(jax.effects_barrier)
    atexit.register(jax.effects_barrier)  # before this rank tells the others that it ends
    return mpi.duplicate(None)


def on_every_rank(host: Callable[..., list[Any]], given: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """What a function on the host makes of arrays, of these shapes and the same types; step after step on every rank.

    The function is called by the thread of the program or by JAX's.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in given):
        pairs = zip(shapes, given, strict=True)
        like = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in pairs]
        return list(io_callback(host, like, *given, ordered=True))
    jax.effects_barrier()
    return [
        jax.device_put(made, leaf.sharding) if isinstance(leaf, jax.Array) else made
        for made, leaf in zip(host(*given), given, strict=True)
    ]


def _named(containers: Any) -> tuple[dict[str, Any], Any]:
    """The arrays by name, in JAX's order, and what they are in."""
    named, outline = jax.tree_util.tree_flatten_with_path(containers)
    return {jax.tree_util.keystr(path): leaf for path, leaf in named}, outline


def average(world: Topology, compression: str) -> Any:
    """See ``hvdkit.arrays.average``."""
    options, among = GradientOptions(compression=compression), comm()
    passes.expect_steps(wait=jax.effects_barrier)

    def init(parameters: Any) -> Any:  # noqa: ARG001
        return optax.EmptyState()

    def update(updates: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:  # noqa: ARG001
        named, outline = _named(updates)
        leaves = list(named.values())
        if world.size == 1 or not leaves:
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                jax.debug.callback(passes.stepped)
            else:
                passes.stepped()
            return updates, state
        on_host = functools.partial(_average_on_host, among, options, list(named))
        means = on_every_rank(on_host, leaves, [leaf.shape for leaf in leaves])
        return outline.unflatten(means), state

    return optax.GradientTransformation(init, update)


class _Checked(Reduce):
    """Compares before each exchange that all ranks average the same tree: else each would wait in another exchange."""

    def __init__(self, gradients: Any, options: GradientOptions, comm: Any, rows: list[str]) -> None:
        super().__init__(gradients, options, exit_watchdog.Marked(comm.Dup()), threaded=False)
        self._all, self._rows, self._table = mpi.ranks(comm), rows, agreement.digest_table(rows)

    def _exchange(self) -> None:
        if not agreement.agree(self._all, self._table, "hvdkit.average"):
            agreement.require_same_rows(self._all, self._rows)
        super()._exchange()


def _average_on_host(comm: Any, options: GradientOptions, names: list[str], *leaves: Any) -> list[Any]:
    """The means of all ranks' arrays, in memory of their own; called by the thread of the program or by JAX's."""
    gradients = dict(zip(names, map(np.asarray, leaves), strict=True))
    key = (options, *((name, one.shape, one.dtype) for name, one in gradients.items()))
    exit_watchdog.in_steps.add(threading.get_ident())
    if key not in _reductions:  # messages of other gradients travel apart
        rows = [f"{name} {one.dtype} {one.shape}" for name, one in gradients.items()]
        mpi.require_same_rows(comm, rows)
        _reductions[key] = _Checked(gradients, options, comm, rows)
    means = _reductions[key](gradients)
    return [np.array(means[name]) for name in names]


# ZeRO stage 1 ---------------------------------------------------------------------------------------------------------

_Take = Callable[[int, Any], Any]  # of an array of the parameter at a place, what a rank would have
_STEPS = 4
_SIDE, _LENGTH = 128, 8192
"""Of an array that is tried: adafactor factors matrices from 128 on."""

jax.tree_util.register_pytree_with_keys(
    OwnState,
    lambda own: (((jax.tree_util.GetAttrKey("inner"), own.inner),), (own.shards, own.parts)),
    lambda kept, children: OwnState(children[0], *kept),
)


def shard_state(inner: Any, world: Topology) -> Any:
    """See ``hvdkit.arrays.shard_state``."""
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise InvalidArgumentError(
            f"shard_state takes a transformation of optax, got {type(inner).__name__}; give optax.adam(...)."
        )
    if world.size > 1:
        comm()

    def init(parameters: Any) -> Any:
        if world.size == 1:
            return inner.init(parameters)
        named, outline = _named(parameters)
        trial = _Trial(inner, named, outline)
        with jax.ensure_compile_time_eval():
            whole = trial.must_be_whole()
        shards = ShardedState(named, world=world, whole=whole)
        state = inner.init(_own(shards, named, outline))
        return OwnState(state, shards, tuple(trial.parts(shards, whole)))

    def update(updates: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        if world.size == 1:
            alone: tuple[Any, Any] = inner.update(updates, state, parameters)
            return alone
        named, outline = _named(updates)
        mine = None if parameters is None else _own(state.shards, *_named(parameters))
        own, kept = inner.update(_own(state.shards, named, outline), state.inner, mine)
        on_host = functools.partial(_gather_on_host, state.shards, list(named))
        made = on_every_rank(on_host, jax.tree.leaves(own), [np.shape(leaf) for leaf in named.values()])
        return outline.unflatten(made), OwnState(kept, state.shards, state.parts)

    return optax.GradientTransformation(init, update)


def _own(shards: ShardedState, named: dict[str, Any], outline: Any) -> Any:
    own = shards.own(named)
    return outline.unflatten([own[name] for name in named])


def _gather_on_host(shards: ShardedState, names: list[str], *own: Any) -> list[Any]:
    exit_watchdog.in_steps.add(threading.get_ident())
    whole = shards.exchange(dict(zip(names, map(np.asarray, own), strict=True)))
    return [whole[name] for name in names]


class _Trial:
    """A transformation on small arrays in the containers of parameters: whole, and as two ranks would have it.

    Each step has gradients of other magnitudes from one number and array to the next, so that whatever looks at several
    numbers shows; the last has one that is not a number.
    """

    def __init__(self, inner: Any, named: dict[str, Any], outline: Any) -> None:
        self._inner, self._outline, self._names = inner, outline, list(named)
        self._like = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in named.values()]
        self._bits = range(max(1, len(self._like).bit_length()))
        try:
            state = self._state_without([])
            self._shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
            self._structure = jax.tree.structure(state)
            self._places = self._find_places()
        except Exception as error:
            raise self._refusal(f"its state cannot be told apart ({error})") from error

    def _state_without(self, places: list[int]) -> Any:
        """Shapes of the state where some parameters are empty."""
        like = [
            jax.ShapeDtypeStruct((*one.shape[:-1], 0), one.dtype) if place in places else one
            for place, one in enumerate(self._like)
        ]
        return jax.eval_shape(self._inner.init, self._outline.unflatten(like))

    def _group(self, bit: int) -> list[int]:
        """Parameters such that any two are apart for some bit, and each is in one group at least."""
        return [place for place in range(len(self._like)) if (place + 1) >> bit & 1]

    def _find_places(self) -> list[int]:
        """Of each array of the state, the parameter that it changes its shape with; -1 where there is none."""
        codes = [0] * len(self._shapes)
        for bit in self._bits:
            without = jax.tree.leaves(self._state_without(self._group(bit)))
            for number, (shape, other) in enumerate(zip(self._shapes, without, strict=True)):
                codes[number] |= (shape != other.shape) << bit
        if max(codes, default=0) > len(self._like):
            raise ValueError("an array in it belongs to several parameters")
        return [code - 1 for code in codes]

    def parts(self, shards: ShardedState, whole: bool) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """What ``OwnState`` says of each array of the state that is divided."""
        by_name = tree.flatten({name: number for number, name in enumerate(self._names)})  # as ``shards`` counts them
        order = {number: place for place, (_, number) in enumerate(by_name)}
        numbered = self._structure.unflatten(range(len(self._shapes)))
        for path, number in tree.flatten(numbered):
            if number is None or self._places[number] < 0:
                continue
            start, stop = shards.owned(order[self._places[number]])
            shape = self._shapes[number]
            yield path, shape, *((0, math.prod(shape) * (stop > start)) if whole else (start, stop))

    def must_be_whole(self) -> bool:
        """Whether parameters may not be cut.

        Raises:
            InvalidArgumentError: nor may they be updated apart from one another.
        """
        drawn = self._draw()
        try:
            whole = self._run(drawn, functools.partial(_whole_or_none, list(range(len(self._like)))))
        except Exception as error:
            raise self._refusal(f"it cannot be tried out ({error})") from error
        if not any(np.any(np.nan_to_num(np.asarray(one, np.complex128))) for made in whole[0] for one in made):
            raise self._refusal(
                f"its first {_STEPS} updates are 0 and show nothing; let MultiSteps, or a schedule that begins with 0, "
                "stand around shard_state or behind it"
            )
        if all(self._agrees(drawn, whole, functools.partial(_half, second)) for second in (False, True)):
            return False
        for bit in self._bits:
            group = self._group(bit)
            for members in (group, [place for place in range(len(self._like)) if place not in group]):
                if not self._agrees(drawn, whole, functools.partial(_whole_or_none, members)):
                    raise self._refusal("it looks at several parameters at a time, or keeps one number of each")
        return True

    def _draw(self) -> list[tuple[list[Any], list[Any]]]:
        """Gradients and parameters of each step."""
        rng = np.random.default_rng(0)
        lengths = [(_SIDE if len(one.shape) > 1 else _LENGTH) for one in self._like]
        shapes = [[min(side, most) for side in one.shape] for one, most in zip(self._like, lengths, strict=True)]

        def draw(shape: list[int]) -> Any:
            values = rng.standard_normal(math.prod(shape))
            slope = np.linspace(-2, 2, values.size) * rng.standard_normal()
            return (values * np.exp(slope + 2 * rng.standard_normal())).reshape(shape)

        steps = [([draw(shape) for shape in shapes], [draw(shape) for shape in shapes]) for _ in range(_STEPS)]
        steps[-1][0][-1].reshape(-1)[-1:] = np.nan
        types = [one.dtype for one in self._like]
        return [
            (list(map(jax.numpy.asarray, gradients, types)), list(map(jax.numpy.asarray, parameters, types)))
            for gradients, parameters in steps
        ]

    def _run(self, drawn: Any, take: _Take) -> tuple[list[list[Any]], list[Any]]:
        """The updates of each step, and the arrays of the state after the last one."""

        def taken(arrays: list[Any]) -> Any:
            return self._outline.unflatten([take(place, array) for place, array in enumerate(arrays)])

        update = jax.jit(self._inner.update)  # compiles less than one by one
        state, made = self._inner.init(taken(drawn[0][1])), []
        for gradients, parameters in drawn:
            updates, state = update(taken(gradients), state, taken(parameters))
            made.append(jax.tree.leaves(updates))
        return made, jax.tree.leaves(state)

    def _agrees(self, drawn: Any, whole: Any, take: _Take) -> bool:
        """Whether what is taken of the parameters is updated as it is among all of them."""
        try:
            made, state = self._run(drawn, take)
            for mine, all_of_it in zip(made, whole[0], strict=True):
                for place, pair in enumerate(zip(mine, all_of_it, strict=True)):
                    if not _equal(pair[0], take(place, pair[1])):
                        return False
            for place, mine, all_of_it in zip(self._places, state, whole[1], strict=True):
                wanted = all_of_it if place < 0 else take(place, all_of_it)
                if (place < 0 or wanted.size) and not _equal(mine, wanted):
                    return False
        except Exception:  # whatever the transformation raises where it expects the whole
            return False
        return True

    def _refusal(self, why: str) -> InvalidArgumentError:
        found = ", ".join(dict.fromkeys(_transformations(self._inner.update))) or repr(self._inner)
        return InvalidArgumentError(
            f"shard_state cannot divide the state of {found}: {why}. Put what looks at all "
            "gradients before it: optax.chain(average(world), optax.clip_by_global_norm(1.0), "
            "shard_state(optax.adam(lr), world))."
        )


def _half(second: bool, place: int, array: Any) -> Any:  # noqa: ARG001
    flat = array.reshape(-1)
    return flat[flat.size // 2 :] if second else flat[: flat.size // 2]


def _whole_or_none(members: list[int], place: int, array: Any) -> Any:
    if place in members:
        return array
    return array[..., :0] if array.ndim else array.reshape(-1)[:0]


def _equal(one: Any, other: Any) -> bool:
    """But for rounding, which may differ with the length of an array."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return False
    if one.dtype.kind in "biu":
        return np.array_equal(one, other)
    one, other = one.astype(np.complex128), other.astype(np.complex128)
    size = np.abs(other[np.isfinite(other)]).max(initial=0.0)
    return np.allclose(one, other, rtol=1e-3, atol=1e-6 * size, equal_nan=True)


def _transformations(function: Any) -> Iterator[str]:
    """The names of what a transformation is made of, such as clip_by_global_norm."""
    name = getattr(function, "__qualname__", "")
    if name.endswith((".update_fn", ".update")) and not name.startswith(("chain.", "with_extra_args_support.")):
        yield name.partition(".")[0]
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        members = held.values() if isinstance(held, dict) else held if isinstance(held, (tuple, list)) else [held]
        for one in members:
            yield from _transformations(getattr(one, "update", one))
