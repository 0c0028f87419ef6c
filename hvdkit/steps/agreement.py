"""Do all ranks hold the same values? Digests of named arrays, and the first difference between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdkit.errors import AgreementError

Digests = npt.NDArray[np.int64]


def digest(array: npt.ArrayLike) -> int:
    """A signed 64-bit digest of an array's dtype, shape and bytes (BLAKE2b); equal values give equal digests.

    Bits count, not values: 0.0 and -0.0 differ, NaN equals itself when its bits do.
    """
    contents = np.asarray(array, order="C")
    state = hashlib.blake2b(f"{contents.dtype.str}{contents.shape}".encode(), digest_size=8)
    state.update(contents.tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)


def digest_table(arrays: Mapping[str, npt.ArrayLike]) -> Digests:
    """Digests of named arrays, int64 (len(arrays), 2), in the mapping's order: of the name, of the value."""
    rows = [(digest(np.frombuffer(name.encode(), dtype=np.uint8)), digest(value)) for name, value in arrays.items()]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where ranks hold different values.

    Attributes:
        position: index into the named arrays of the ranks that have it.
        groups: ranks with equal values, the group of the lowest rank first.
        same_names: False when already the names (or their number) differ, so that the models are not the same.
    """

    position: int
    groups: tuple[tuple[int, ...], ...]
    same_names: bool


def first_difference(tables: Sequence[Digests]) -> Difference | None:
    """The first difference between the digest tables of the ranks, in rank order; None when all are equal."""
    longest = max((len(table) for table in tables), default=0)
    for position in range(longest):
        rows = [tuple(table[position].tolist()) if position < len(table) else () for table in tables]
        if len(set(rows)) > 1:
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, row in enumerate(rows):
                groups.setdefault(row, []).append(rank)
            same_names = len({row[:1] for row in rows}) == 1
            return Difference(position, tuple(tuple(ranks) for ranks in groups.values()), same_names)
    return None


def layout_error(difference: Difference, rows: Sequence[str], rank: int) -> AgreementError:
    """The error for ranks that hold different models.

    Args:
        difference: where the names differ.
        rows: this rank's "name type shape", in order.
        rank: this rank.
    """
    mine = rows[difference.position] if difference.position < len(rows) else "nothing"
    return AgreementError(
        f"the ranks hold different models: rank {rank} has {mine} at position {difference.position}, which "
        f"differs between {_sides(difference)}; build the same model on every rank."
    )


def value_error(difference: Difference, name: str, largest: float) -> AgreementError:
    """The error for ranks whose models are the same and whose values differ.

    Args:
        difference: where the values differ.
        name: what differs there.
        largest: the largest absolute difference between any rank and the root.
    """
    return AgreementError(
        f"the ranks disagree: {name} differs between {_sides(difference)}, by at most {largest:.3g}; "
        "broadcast before training, and average every gradient that is applied."
    )


def _sides(difference: Difference) -> str:
    return " and ".join(name_ranks(group) for group in difference.groups)


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message, runs folded: "rank 3", "ranks 0-2, 5".

    Args:
        ranks: in increasing order, at least one.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
