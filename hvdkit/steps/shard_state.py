"""Which rank keeps the optimizer's state of which numbers (ZeRO stage 1); used by every adapter.

Each rank updates its own numbers with the mean gradient, and gives what they have become to the others. The state of an
optimizer, such as Adam's two moments, then takes 1 / n of the memory on each of n ranks.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.core.communicator import Communicator
from hvdkit.errors import CheckpointError, InvalidArgumentError, name_ranks

MESSAGE_BYTES = 4 * 2**20
"""Pieces of one owner travel together up to so many; a larger one travels alone, out of and into its own memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers of one parameter, from ``start`` to ``stop`` in C order, that one rank updates."""

    place: int  # of the parameter among those that were divided
    start: int
    stop: int
    owner: int  # the rank
    cut: bool  # whether they are not the whole parameter


def divide(sizes: Sequence[int], ranks: int, whole: Collection[int] = ()) -> list[Piece]:
    """Divide parameters so that every rank has as many numbers, but for at most ``ranks - 1``; the same on every rank.

    Neighbours stay together, so that few parameters are cut: at most ``ranks - 1``.

    Args:
        sizes: numbers of each parameter.
        ranks: how many share them, >= 1.
        whole: places of parameters that may not be cut; each goes, the largest first, to the rank with the least.
    Returns:
        The pieces in the order of the parameters. A parameter without numbers has none.
    """
    held, owners = [0] * ranks, {}
    for place in sorted(whole, key=lambda place: (-sizes[place], place)):
        owners[place] = min(range(ranks), key=held.__getitem__)
        held[owners[place]] += sizes[place]
    share = -(-sum(sizes) // ranks)
    pieces, owner = [], 0
    for place, size in enumerate(sizes):
        if place in owners:
            pieces.append(Piece(place, 0, size, owners[place], cut=False))
            continue
        start = 0
        while start < size:
            while held[owner] >= share and owner < ranks - 1:
                owner += 1
            room = size if owner == ranks - 1 else share - held[owner]
            stop = min(size, start + room)
            pieces.append(Piece(place, start, stop, owner, cut=stop - start < size))
            held[owner] += stop - start
            start = stop
    return [piece for piece in pieces if piece.stop > piece.start]


def require_alone(shard_state: Any, *, every: Any, op: str, process_set: Any) -> bool:
    """Whether ``distribute`` is to divide the state; refuses what excludes it.

    Raises:
        InvalidArgumentError: it is no bool, or given with every=, op="adasum" or process_set=.
    """
    if not isinstance(shard_state, bool):
        raise InvalidArgumentError(f"shard_state must be True or False, got {shard_state!r}.")
    others = {"every": every, "op": "adasum" if op == "adasum" else None, "process_set": process_set}
    given = [f"{name}={value!r}" for name, value in others.items() if value is not None]
    if shard_state and given:
        raise InvalidArgumentError(
            f"shard_state=True divides the state over all ranks, which take every step together; leave {given[0]} out."
        )
    return shard_state


# In checkpoints -------------------------------------------------------------------------------------------------------


def file_of(name: str, rank: int, ranks: int) -> str:
    """The file that a rank writes, such as ``optimizer-1-of-2.pt`` from ``optimizer.pt``."""
    stem, _, suffix = name.partition(".")
    return f"{stem}-{rank}-of-{ranks}.{suffix}"


def files_in(directory: Path, name: str) -> list[Path]:
    """The files that all ranks wrote, by rank; empty where the state was not divided.

    Raises:
        CheckpointError: some of them are missing.
    """
    stem, _, suffix = name.partition(".")
    found = sorted(directory.glob(f"{stem}-*-of-*.{suffix}"))
    if not found:
        return []
    ranks = found[0].name.removesuffix(f".{suffix}").rpartition("-of-")[2]
    wanted = [directory / file_of(name, rank, int(ranks)) for rank in range(int(ranks))] if ranks.isdigit() else []
    missing = [rank for rank, file in enumerate(wanted) if file not in found]
    if missing or len(wanted) != len(found):
        raise CheckpointError(f"{directory} lacks the optimizer's state of {name_ranks(missing)}.")
    return wanted


def require_shared(ranks: Communicator, directory: str, what: str) -> None:
    """Raise CheckpointError, on every rank, unless all see a directory that rank 0 has made; ``what`` they do there."""
    everyone = ranks.gather_texts("sees" if Path(directory).is_dir() else "not", "hvdkit.shared_directory")
    blind = [rank for rank, text in enumerate(everyone) if text == "not"]
    if blind:
        raise CheckpointError(
            f"{name_ranks(blind)} cannot see {directory}, where every rank {what} the state that it keeps "
            "(shard_state=True); give a directory on a file system that all hosts share."
        )


def span(pieces: Iterable[tuple[int, int]], start: int, stop: int, what: str) -> list[tuple[int, int, int]]:
    """Of which pieces, and which numbers of each, ``start .. stop`` of a parameter are put together.

    Args:
        pieces: start and stop of each that was saved, in any order.
        what: the parameter, for the message.
    Returns:
        Place of the piece, and start and stop within it; ordered.
    Raises:
        CheckpointError: some numbers are in no piece.
    """
    parts, at = [], start
    for place, (begin, end) in sorted(enumerate(pieces), key=lambda one: one[1]):
        if begin <= at < min(end, stop):
            parts.append((place, at - begin, min(end, stop) - begin))
            at = min(end, stop)
    if at < stop:
        raise CheckpointError(f"the optimizer's state of {what} was saved without the numbers from {at} to {stop}.")
    return parts
