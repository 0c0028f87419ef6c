"""The state of a training in containers of arrays: broadcast, compared, averaged; the inside of ``hvdkit.arrays``."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.arrays import mpi, seeds, tree
from hvdkit.errors import AgreementError, InvalidArgumentError
from hvdkit.steps import agreement, metrics
from hvdkit.steps.topology import Topology

Array = npt.NDArray[Any]


def read(state: Any) -> list[tuple[str, Any, Array | None]]:
    """Path, leaf and NumPy array of everything in a state; None stays None.

    Raises:
        InvalidArgumentError: something that is no array, number, None or container of these.
    """
    found: list[tuple[str, Any, Array | None]] = []
    for path, leaf in tree.flatten(state):
        if leaf is not None and tree.device_of(leaf) == "cuda":
            from hvdkit.arrays.exchange import cuda

            found.append((path, leaf, cuda.cupy().asnumpy(cuda.cupy().from_dlpack(leaf))))
        else:
            found.append((path, leaf, None if leaf is None else tree.to_host(leaf, path)))
    return found


def row(path: str, array: Array | None) -> str:
    """Name, type and shape, for digests and messages."""
    return f"{path} None" if array is None else f"{path} {array.dtype} {array.shape}"


def remade(state: Any, leaves: Sequence[Any], arrays: Sequence[Array | None]) -> Any:
    """The state with other values: NumPy arrays that can be written are, everything else is made anew."""

    def one(leaf: Any, array: Array | None) -> Any:
        if array is None or leaf is None:
            return None
        if isinstance(leaf, np.ndarray):
            if not leaf.flags.writeable:
                return array.copy()
            leaf[...] = array
            return leaf
        return tree.maker(leaf)(array)

    return tree.rebuild(state, iter([one(*pair) for pair in zip(leaves, arrays, strict=True)]))


def broadcast(state: Any, root: int) -> Any:
    """The inside of ``hvdkit.arrays.broadcast_state``."""
    comm = mpi.everyone()
    if not isinstance(root, int) or not 0 <= root < comm.Get_size():
        raise InvalidArgumentError(f"root must be a rank in 0 .. {comm.Get_size() - 1}, got {root!r}.")
    found = mpi.together(comm, lambda: read(state))
    mpi.require_same_rows(comm, [row(path, array) for path, _, array in found])
    received: list[Array | None] = []
    for _, _, array in found:
        copied = None if array is None else np.array(array, order="C")
        if copied is not None and copied.nbytes:
            comm.Bcast(copied.reshape(-1).view(np.uint8), root=root)
        received.append(copied)
    return remade(state, [leaf for _, leaf, _ in found], received)


def check(state: Any, world: Topology, loader_facts: Mapping[str, float]) -> None:
    """The inside of ``hvdkit.arrays.check_agreement``."""
    comm = mpi.everyone()
    found = mpi.together(comm, lambda: read(state))
    arrays: dict[str, Array] = {}
    for position, (path, _, array) in enumerate(found):
        if array is not None:  # {"a.b": x, "a": {"b": y}} has a path twice
            arrays[f"{path} ({position})" if path in arrays else path] = array
    fixes: dict[str, str] = {}
    pairs = ((loader_facts, agreement.ITERATE_ALIKE), (seeds.facts(), agreement.SEED_ALIKE))
    for facts, fix in pairs:
        arrays.update({name: np.array(value, np.float64) for name, value in facts.items()})
        fixes.update(dict.fromkeys(facts, fix))
    if world.size == 1:
        return
    rows = [row(path, array) for path, array in arrays.items()]
    table = agreement.value_table(rows, [agreement.digest(array) for array in arrays.values()])
    if agreement.agree([table], functools.partial(mpi.minimum, comm)):
        return
    difference = agreement.first_difference(mpi.gather_tables(comm, table))
    if difference is None:
        raise AgreementError("the ranks' digests differ, but not those of any array; this is an error of hvdkit.")
    if not difference.same_names:
        raise agreement.layout_error(difference, rows, world.rank)
    name, array = list(arrays.items())[difference.position]
    raise agreement.value_error(difference, name, _largest(comm, array), fixes.get(name, agreement.BROADCAST))


def _largest(comm: Any, array: Array) -> float:
    """The largest absolute difference between any rank's values and the root's; a collective."""
    exact: dict[str, Any] = {
        "c": np.complex128,
        "i": np.longdouble,
        "u": np.longdouble,
    }  # float64 does not hold every int64
    mine: Array = array.astype(exact.get(array.dtype.kind, np.float64))
    root = mine.copy()
    comm.Bcast(root, root=0)
    with np.errstate(all="ignore"):  # an error here alone would leave the others waiting
        gap = float(np.abs(mine - root).max()) if mine.size else math.nan
    return float(np.max(comm.allgather(gap)))  # nan, where a value is none


def average(values: Mapping[str, Any], world: Topology) -> dict[str, float]:
    """The inside of ``hvdkit.arrays.average_metrics``."""
    comm = mpi.everyone()
    pairs = mpi.together(comm, lambda: metrics.sums_and_counts(values))
    metrics.require_same_names(mpi.gather_tables(comm, metrics.names_table(pairs)), pairs)
    if not pairs:
        return {}
    totals = np.array(list(pairs.values()), dtype=np.float64)
    comm.Allreduce(mpi.library().IN_PLACE, totals)
    return metrics.means(pairs, totals.tolist(), world.size)
