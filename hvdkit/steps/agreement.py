"""Do all ranks hold the same values? Digests of named arrays, and the first difference between ranks."""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdkit.core.communicator import Communicator
from hvdkit.errors import AgreementError, InvalidArgumentError, name_ranks, whole

Digests = npt.NDArray[np.int64]
Words = TypeVar("Words")

WARNING: weakref.WeakSet[Any] = weakref.WeakSet()
"""Each ``CheckAgreement`` in use that warns and has the ranks train on, whatever differs."""
CHUNK = 2**16  # words of a tensor that are mixed at once: they stay in a CPU's cache
BROADCAST = "broadcast before training, and average every gradient that is applied"
ITERATE_ALIKE = "shard the same data set with the same arguments on every rank, and iterate alike"
SEED_ALIKE = "call seed_everything with the same seed on every rank, and seed nothing after it"
_MODELS, _SAME_MODEL = "hold different models", "build the same model"
_CHUNKS = 0x1E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64  # as int64 holds them


def digest(array: npt.ArrayLike) -> int:
    """A signed 64-bit digest of an array's dtype, shape and bytes (BLAKE2b); equal values give equal digests.

    Bits count, not values: 0.0 and -0.0 differ, NaN equals itself when its bits do.
    """
    contents = np.asarray(array, order="C")
    state = hashlib.blake2b(f"{contents.dtype.str}{contents.shape}".encode(), digest_size=8)
    if contents.dtype.char in "gG" and np.finfo(contents.dtype).nmant == 63:  # the rest is padding that nobody sets
        contents = contents.reshape(-1).view(np.uint8).reshape(-1, np.longdouble().itemsize)[:, :10]
    state.update(contents.tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)


@functools.cache
def salts(count: int) -> Digests:
    """Fixed random numbers, int64 (count,), one for each position in a chunk."""
    return np.random.PCG64(1706_02677).random_raw(count).view(np.int64)


def masked_shift(words: Any, distance: int) -> Any:
    """int64 words shifted to the right without their sign, where a framework's own shift copies it."""
    words = words >> distance
    words &= 2 ** (64 - distance) - 1
    return words


def salted(words: Words, salts: Words, shift: Callable[[Any, int], Any] = masked_shift) -> Words:
    """Integers whose sum (mod 2**64) is a digest of ``words``, in any framework, on the device where they are.

    A term is mix(word + salt), mix the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom
    Number Generators", OOPSLA 2014) with the constants of Vigna's splitmix64.c (Stafford's mix 13). It is a bijection
    in which every bit reaches all others: a single word that changes always changes the sum, and any other change all
    but surely.

    Args:
        words: int64 (m,), a tensor's bits, or a chunk of them.
        salts: int64 (m,), ``salts(m)`` on that device.
        shift: int64 words and a distance to int64 words shifted to the right, filled up with zeros.
    """
    mixed: Any = words + salts  # type: ignore[operator]
    # in place, where a framework can: half the time of new arrays
    mixed ^= shift(mixed, 30)
    mixed *= _FIRST
    mixed ^= shift(mixed, 27)
    mixed *= _SECOND
    mixed ^= shift(mixed, 31)
    return mixed  # type: ignore[no-any-return]


def join_chunks(digests: Iterable[Words]) -> Words | int:
    """The digest of a tensor from those of its chunks, in their order; 0 for none."""
    total: Any = 0
    for one in digests:
        total = total * _CHUNKS + one
    return total  # type: ignore[no-any-return]


def array_digests(arrays: Iterable[npt.NDArray[Any]], chunk: int = CHUNK) -> Digests:
    """A digest of the bits of each NumPy array, int64 (number of arrays,); of its shape and type it knows nothing.

    Args:
        arrays: of any shape and any type of fixed size.
        chunk: words from one use of a salt to the next; another number gives other digests.
    """

    def unsigned_shift(words: Digests, distance: int) -> Digests:
        return (words.view(np.uint64) >> distance).view(np.int64)

    def mix(words: npt.NDArray[Any]) -> Digests:
        total = np.zeros(1, dtype=np.int64)  # an array's sums wrap around, where NumPy warns of a number's
        for start in range(0, len(words), CHUNK):  # in the cache, however long the chunk is
            part = words[start : start + CHUNK].astype(np.int64, copy=False)
            total += salted(part, salts(chunk)[start : start + len(part)], unsigned_shift).sum()
        return total

    def one(array: npt.NDArray[Any]) -> Any:
        flat = np.ascontiguousarray(array).reshape(-1)
        words = flat.view(np.int64 if flat.nbytes % 8 == 0 else f"i{flat.itemsize}")
        return np.sum(join_chunks(mix(words[start : start + chunk]) for start in range(0, len(words), chunk)))

    return np.array([one(array) for array in arrays], dtype=np.int64)


def digest_table(names: Iterable[str], values: npt.ArrayLike = 0) -> Digests:
    """Digests of names such as "name type shape", int64 (number of names, 2), each beside that of its value, or a 0."""
    of_names = [digest(np.frombuffer(name.encode(), dtype=np.uint8)) for name in names]
    table = np.empty((len(of_names), 2), dtype=np.int64)
    table[:, 0], table[:, 1] = of_names, values
    return table


def agree(ranks: Communicator, table: Digests, name: str) -> bool:
    """Whether all ranks hold equal tables, by one small allreduce of this name; the same answer on every rank."""
    mine = digest(table)
    lowest, inverted_highest = ranks.allreduce(np.array([mine, ~mine], dtype=np.int64), name, op="min")
    return bool(lowest == ~inverted_highest)


@dataclass(frozen=True, slots=True)
class RanksDiffer:
    """The first place where ranks hold different values."""

    position: int  # index into the named arrays of the ranks that have it
    groups: tuple[tuple[int, ...], ...]  # ranks with equal values, the group of the lowest rank first
    same_names: bool  # False when already the names (or their number) differ, so that the models are not the same


def first_difference(tables: Sequence[Digests]) -> RanksDiffer | None:
    """The first difference between the digest tables of the ranks, in rank order; None when all are equal."""
    longest = max((len(table) for table in tables), default=0)
    for position in range(longest):
        rows = [tuple(table[position].tolist()) if position < len(table) else () for table in tables]
        if len(set(rows)) > 1:
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, row in enumerate(rows):
                groups.setdefault(row, []).append(rank)
            same_names = len({row[:1] for row in rows}) == 1
            return RanksDiffer(position, tuple(tuple(ranks) for ranks in groups.values()), same_names)
    return None


def require_same_rows(ranks: Communicator, rows: Sequence[str], fault: str = _MODELS, fix: str = _SAME_MODEL) -> None:
    """Raise an AgreementError on every rank when the rows, "name type shape", differ between ranks; a collective.

    Args:
        fault, fix: what the ranks do wrong then, and should do on every rank.
    """
    difference = first_difference(ranks.allgather(digest_table(rows), "hvdkit.layout"))
    if difference is not None:
        raise layout_error(difference, rows, ranks.rank(), fault, fix)


def require_same_values(
    ranks: Communicator,
    rows: Sequence[str],
    digests: npt.ArrayLike,
    value_at: Callable[[int], tuple[str, npt.NDArray[Any]]],
    fixes: Mapping[str, str] | None = None,
    among: Iterable[int] | None = None,
) -> None:
    """Raise an AgreementError on every rank when rows or values differ between ranks; a collective.

    Args:
        rows: this rank's values as "name type shape", in order.
        digests: int64 (len(rows),), of the values.
        value_at: name and value at a position, on the host; asked for on all ranks, of the one that differs first.
        fixes: what to do where a value differs, by its name; default: broadcast.
        among: the ranks that must agree with this one; default: all.
    """
    table = digest_table(rows, digests)
    if among is None and agree(ranks, table, "hvdkit.agree"):
        return
    tables = ranks.allgather(table, "hvdkit.digests")
    members = range(len(tables)) if among is None else sorted(among)
    found = first_difference([tables[rank] for rank in members])
    if found is None:
        if among is not None:
            return
        raise AgreementError("the ranks' digests differ, but not those of any tensor; this is an error of hvdkit.")
    difference = replace(found, groups=tuple(tuple(members[place] for place in group) for group in found.groups))
    if not difference.same_names:
        raise layout_error(difference, rows, ranks.rank())
    name, value = value_at(difference.position)
    # Only a difference that all ranks have found, at the same place, can be measured together.
    largest = ranks.largest_difference(value) if among is None else math.nan
    raise AgreementError(
        f"the ranks disagree: {name} differs between {_sides(difference)}, by at most {largest:.3g}; "
        f"{(fixes or {}).get(name, BROADCAST)}."
    )


def layout_error(
    difference: RanksDiffer, rows: Sequence[str], rank: int, fault: str = _MODELS, fix: str = _SAME_MODEL
) -> AgreementError:
    """What to raise where rows, "name type shape", differ; see ``require_same_rows``."""
    mine = rows[difference.position] if difference.position < len(rows) else "nothing"
    return AgreementError(
        f"the ranks {fault}: rank {rank} has {mine} at position {difference.position}, which "
        f"differs between {_sides(difference)}; {fix} on every rank."
    )


class EveryFewSteps:
    """Calls a check after every ``every`` steps, and raises or warns when it fails.

    Args:
        check: raises AgreementError, on every rank, when the ranks disagree; a collective.
        every: steps from one check to the next, >= 1, the same on every rank.
        on_disagreement: "raise", or "warn" and train on: then nothing else ends ranks that differ, either.
    Raises:
        InvalidArgumentError: a number below 1, or an unknown reaction.
    """

    def __init__(self, check: Callable[[], None], every: int, on_disagreement: str) -> None:
        every = whole("every", every, 1)
        if on_disagreement not in ("raise", "warn"):
            raise InvalidArgumentError(f"on_disagreement must be raise or warn, got {on_disagreement!r}.")
        self._check, self._every, self._warns = check, every, on_disagreement == "warn"
        self.steps = 0
        if self._warns:
            WARNING.add(self)

    def step(self) -> None:
        """Count one step, and check when it is time.

        Raises:
            AgreementError: on every rank, naming the step, unless the reaction is "warn".
        """
        self.steps += 1
        if self.steps % self._every:
            return
        try:
            self._check()
        except AgreementError as error:
            if not self._warns:
                raise AgreementError(f"after step {self.steps}, {error}") from None
            warnings.warn(f"after step {self.steps}, {error}", RuntimeWarning, stacklevel=2)


def _sides(difference: RanksDiffer) -> str:
    return " and ".join(name_ranks(group) for group in difference.groups)
