"""The mean over the ranks as a transformation of optax, a pure function; the inside of ``hvdkit.arrays.average``.

What ``jax.jit`` compiles hands the gradients to the host by an ordered callback: every rank averages step after step,
and the compiler may neither drop nor repeat one. It runs behind the program. Whatever else of hvdkit asks the ranks
waits for it, since MPI's calls pair up in their order.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdkit.arrays import exit_watchdog, mpi
from hvdkit.arrays.optimizer import Reduce
from hvdkit.errors import of_extra
from hvdkit.steps import agreement, passes
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.topology import Topology

with of_extra("jax", "hvdkit.arrays.average is a transformation of optax for JAX"):
    import jax
    import optax
    from jax.experimental import io_callback

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


def average(world: Topology, compression: str) -> Any:
    """See ``hvdkit.arrays.average``."""
    options, among = GradientOptions(compression=compression), comm()
    passes.expect_steps(wait=jax.effects_barrier)

    def init(parameters: Any) -> Any:  # noqa: ARG001
        return optax.EmptyState()

    def update(updates: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:  # noqa: ARG001
        named, outline = jax.tree_util.tree_flatten_with_path(updates)
        names = [jax.tree_util.keystr(path) for path, _ in named]
        leaves = [leaf for _, leaf in named]
        if world.size == 1 or not leaves:
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                jax.debug.callback(passes.stepped)
            else:
                passes.stepped()
            return updates, state
        on_host = functools.partial(_on_host, among, options, names)
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


def _on_host(comm: Any, options: GradientOptions, names: list[str], *leaves: Any) -> list[Any]:
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
