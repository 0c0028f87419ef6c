"""The state of a training in containers of arrays: read, broadcast (step 5), put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.arrays import mpi, tree
from hvdkit.arrays.tree import Array
from hvdkit.core.communicator import BROADCAST
from hvdkit.errors import InvalidArgumentError


def read(state: Any) -> list[tuple[str, Any, Array | None]]:
    """Path, leaf and NumPy array of everything in a state; None stays None.

    Of an array that is divided among the ranks the leaf is a ``tree.OwnPart``, and the array what this rank keeps.

    Raises:
        InvalidArgumentError: something that is no array, number, None or container of these.
    """
    found: list[tuple[str, Any, Array | None]] = []
    for path, leaf in tree.flatten(state):
        held = leaf.leaf if isinstance(leaf, tree.OwnPart) else leaf
        found.append((path, leaf, None if held is None else tree.to_host(held, path)))
    return found


def row(path: str, leaf: Any, array: Array | None) -> str:
    """Name, type and (whole) shape, for digests and messages."""
    if array is None:
        return f"{path} None"
    return f"{path} {array.dtype} {leaf.shape if isinstance(leaf, tree.OwnPart) else array.shape}"


def remade(state: Any, leaves: Sequence[Any], arrays: Sequence[Array | None]) -> Any:
    """The state with other values: NumPy arrays that can be written are, everything else is made anew."""

    def one(leaf: Any, array: Array | None) -> Any:
        leaf = leaf.leaf if isinstance(leaf, tree.OwnPart) else leaf
        if array is None or leaf is None:
            return None
        if isinstance(leaf, np.ndarray):
            if not leaf.flags.writeable:
                return array.copy()
            leaf[...] = array
            return leaf
        return tree.maker(leaf)(array)

    return tree.rebuild(state, iter([one(*pair) for pair in zip(leaves, arrays, strict=True)]))


def broadcast_state(state: Any, root: int = 0) -> Any:
    """Give every rank the root's arrays and numbers, bit for bit (step 5): ``state = broadcast_state(state)``.

    Args:
        state: containers of arrays and numbers: parameters, an optimizer's slots and counters, ...
        root: rank to copy from.
    Returns:
        The state with the root's values, in the same containers and frameworks. NumPy arrays that can be written are
        overwritten and are the ones returned; other arrays are made anew.
    Raises:
        InvalidArgumentError: a root that is not a rank, or something that is no array, number or container.
        AgreementError: the ranks' states differ in names, shapes or types; raised on every rank.
    """
    comm = mpi.everyone()
    if not isinstance(root, int) or not 0 <= root < comm.Get_size():
        raise InvalidArgumentError(f"root must be a rank in 0 .. {comm.Get_size() - 1}, got {root!r}.")
    ranks = mpi.ranks()
    found = ranks.together(lambda: read(state))
    mpi.require_same_rows(comm, [row(*one) for one in found])
    received: list[Array | None] = []
    for _, leaf, array in found:
        if isinstance(leaf, tree.OwnPart):
            received.append(array)
            continue
        copied = None if array is None else np.array(array, order="C")
        if copied is not None and copied.nbytes:
            ranks.run(BROADCAST, copied, "hvdkit.broadcast_state", root=root)
        received.append(copied)
    return remade(state, [leaf for _, leaf, _ in found], received)
