"""Gradients in fewer bytes where no library adds up such numbers: each rank adds up one part of them, for all.

A vector of gradients is cut into as many parts as there are ranks. Every rank packs its own values of each part and
gives them to the rank of that part (alltoall), which unpacks them, adds them up, and packs the result once for all
(allgather). So all ranks get the same bytes, and with them the same bits. The collectives are the caller's.

==========  =========  =============================================================================================
packing     bytes      rounding
==========  =========  =============================================================================================
``Halves``  2          to the nearest of 11 bits (float16) or 8 bits (bfloat16), twice
``Int8``    1.016      to one of 255 steps of the largest of 256 neighbours; what was rounded away is added to the
                       next gradient of this rank (error feedback)
==========  =========  =============================================================================================

Sources: Alistarh et al. 2017, QSGD, arXiv:1610.02132 (stochastic rounding in blocks); Seide et al. 2014, "1-bit
stochastic gradient descent" (error feedback); Tang et al. 2019, DoubleSqueeze, arXiv:1905.05957 (of both roundings).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.core.communicator import ALLGATHER, ALLTOALL, Communicator

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
AT_ONCE = 2**20
"""Numbers that are packed at once where others travel meanwhile: at 1 Gbit/s they take 8 ms on two ranks."""
BLOCK = 256
"""Gradients that share a scale in ``Int8``."""
_CHUNK = 1 << 16  # values at a time: what is made of them stays in a core's cache
_LARGEST = 127 / 1.000001  # of a code: a step less of rounding than would leave the byte
_SMALLEST = np.float32(1e-37)  # of a scale: the inverse of a smaller one is infinite
_INFINITE, _NAN = 127, -128  # codes in a block whose scale is negative: it holds a value that is not finite
_NOISE = 1 << 18


class Packing(ABC):
    """How one vector of gradients, of this ``length``, is packed: in a ``row`` of bytes for each rank's part."""

    length: int
    row: int

    @abstractmethod
    def pack(self, values: Array, factor: float = 1.0) -> Bytes:
        """This rank's values times ``factor``, (length,), packed: (ranks, row), a row for each rank."""

    @abstractmethod
    def add_up(self, received: Bytes, factor: float) -> Bytes:
        """The sum of what all ranks have for this one, (ranks, row), times ``factor``, packed for all: (row,)."""

    @abstractmethod
    def unpack(self, gathered: Bytes, values: Array) -> None:
        """Put all ranks' parts, (ranks, row), into ``values``, (length,)."""


class Halves(Packing):
    """In half precision, added up in ``dtype``: bfloat16, or float16, which is infinite beyond 65504."""

    def __init__(self, length: int, ranks: int, dtype: Any, *, bfloat16: bool) -> None:
        self.length, self._ranks, self._part = length, ranks, -(-length // ranks)
        self._dtype, self._bfloat16 = dtype, bfloat16
        self.row = 2 * self._part
        self._packed = np.zeros((ranks, self._part), np.uint16 if bfloat16 else np.float16)

    @np.errstate(all="ignore")
    def _rounded(self, values: Array, factor: float) -> Array:
        if not self._bfloat16:
            return np.multiply(values, factor).astype(np.float16)
        wide = np.multiply(values, factor).astype(np.float32)
        bits = wide.view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
        return np.where(np.isnan(wide), 0x7FC0, nearest).astype(np.uint16)

    def _wide(self, packed: Bytes) -> Array:
        if not self._bfloat16:
            return packed.view(np.float16).astype(self._dtype)
        return (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(self._dtype)

    def pack(self, values: Array, factor: float = 1.0) -> Bytes:
        self._packed.reshape(-1)[: self.length] = self._rounded(values, factor)
        return self._packed.view(np.uint8)

    @np.errstate(all="ignore")
    def add_up(self, received: Bytes, factor: float) -> Bytes:
        total = self._wide(received[0])
        for row in received[1:]:
            total += self._wide(row)
        return self._rounded(total, factor).view(np.uint8)

    def unpack(self, gathered: Bytes, values: Array) -> None:
        values[...] = self._wide(gathered.reshape(-1))[: self.length]


class Int8(Packing):
    """In 8 bits, with a scale for each ``BLOCK`` values.

    A value becomes one of the two codes beside it, at random and so that the mean is the value. What is not finite
    stays what it is. The noise follows from the rank and from how often it was drawn: a training that goes on with what
    ``to_save`` has returned rounds as it would have.
    """

    def __init__(self, length: int, rank: int, ranks: int) -> None:
        self.length, self.rank, self.ranks = length, rank, ranks
        self._part = max(1, -(-length // (ranks * BLOCK))) * BLOCK
        self.row = self._part + 4 * (self._part // BLOCK)
        self._kept = np.zeros(ranks * self._part, np.float32)
        self.kept = self._kept[:length]  # what was rounded away and comes with the next gradient
        self.drawn = 0  # how often noise was
        self._packed = np.empty((ranks, self.row), np.uint8)
        self._wide = np.empty(min(_CHUNK, self._part), np.float32)

    def _chunks(self, row: Bytes) -> Iterator[tuple[int, Array, Array]]:
        """Of one part, chunk by chunk: where it begins, its codes (blocks, BLOCK) and scales (blocks, 1)."""
        codes, scales = row[: self._part].view(np.int8), row[self._part :].view(np.float32)
        for start in range(0, self._part, _CHUNK):
            chunk = codes[start : start + _CHUNK].reshape(-1, BLOCK)
            yield start, chunk, scales[start // BLOCK :][: len(chunk), None]

    @np.errstate(all="ignore")
    def pack(self, values: Array, factor: float = 1.0) -> Bytes:
        for part in range(self.ranks):
            for start, codes, scales in self._chunks(self._packed[part]):
                first = part * self._part + start
                given = values[first : first + codes.size]
                wanted = self._kept[first : first + codes.size]
                own = wanted[: len(given)]
                np.add(own, given if factor == 1.0 else given * factor, out=own, casting="unsafe")
                self._round(wanted.reshape(codes.shape), codes, scales)
        return self._packed

    def _round(self, wanted: Array, codes: Array, scales: Array) -> None:
        """Put codes and scales in place; ``wanted``, (blocks, BLOCK), becomes what they lack."""
        self.drawn += 1
        start = (self.drawn * 40503 + self.rank * 104729) % (_NOISE - _CHUNK)
        noise = _noise()[start : start + wanted.size].reshape(wanted.shape)
        places, compiled = map(_address, (wanted, noise, codes, scales)), _compiled()
        if compiled is not None and compiled.horovod_int8_round(*places, len(codes)):
            return
        wide = self._wide[: wanted.size].reshape(wanted.shape)
        np.abs(wanted, out=wide)
        largest = wide.max(axis=1, keepdims=True)
        lost = None if np.isfinite(largest).all() else ~np.isfinite(wanted)
        if lost is not None:
            found, wanted[lost] = wanted[lost], 0
            largest = np.abs(wanted).max(axis=1, keepdims=True)
        np.divide(largest, _LARGEST, out=scales)
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > _SMALLEST)
        if lost is not None:  # one code less, which says infinite
            marked = lost.any(axis=1, keepdims=True)
            inverse *= np.where(marked, np.float32(126 / 127), 1)
            np.multiply(scales, np.float32(127 / 126), out=scales, where=marked)
        np.multiply(wanted, inverse, out=wide)
        wide += noise
        np.floor(wide, out=wide)
        codes[...] = wide
        wide *= scales
        wanted -= wide
        if lost is not None:
            codes[lost] = np.where(np.isnan(found), _NAN, np.sign(found) * _INFINITE)
            wanted[lost] = 0
            np.negative(np.maximum(scales, _SMALLEST), out=scales, where=marked)

    @staticmethod
    def _value(codes: Array, scales: Array, values: Array) -> Array:
        """What codes stand for, put into ``values``, float32 (blocks * BLOCK,)."""
        wide = values[: codes.size].reshape(codes.shape)
        compiled = _compiled()
        if compiled is None:
            np.multiply(codes, scales, out=wide)
        else:
            compiled.horovod_int8_values(*map(_address, (codes, scales, wide)), len(codes))
        marked = scales[:, 0] < 0
        if marked.any():
            own = codes[marked].astype(np.float32)
            ends = {_INFINITE: np.inf, -_INFINITE: -np.inf, _NAN: np.nan}
            finite = -wide[marked]
            for code, value in ends.items():
                finite[own == code] = value
            wide[marked] = finite
        return wide

    @np.errstate(all="ignore")
    def add_up(self, received: Bytes, factor: float) -> Bytes:
        result = np.empty(self.row, np.uint8)
        first, *others = received
        term = np.empty_like(self._wide)
        total = np.empty_like(self._wide)
        for (start, codes, scales), *chunks in zip(
            self._chunks(result), self._chunks(first), *map(self._chunks, others), strict=True
        ):
            whole = self._value(chunks[0][1], chunks[0][2], total)
            for _, its_codes, its_scales in chunks[1:]:
                whole += self._value(its_codes, its_scales, term)
            whole *= np.float32(factor)
            self._round(whole, codes, scales)
            whole /= np.float32(factor)
            here = self.rank * self._part + start
            self._kept[here : here + codes.size] += whole.reshape(-1)
        self._kept[self.length :] = 0
        return result

    @np.errstate(all="ignore")
    def unpack(self, gathered: Bytes, values: Array) -> None:
        for part, row in enumerate(gathered):
            for start, codes, scales in self._chunks(row):
                here = values[part * self._part + start :][: codes.size]
                if here.dtype == np.float32 and len(here) == codes.size and here.flags.carray:
                    self._value(codes, scales, here)
                else:
                    here[...] = self._value(codes, scales, self._wide).reshape(-1)[: len(here)]


def combine(run: Callable[[str, Array, str], Array], packing: Packing, values: Array, name: str, factor: float) -> None:
    """Put the sum of all ranks' ``values`` times ``factor`` into them by ``Communicator.run``; a collective."""
    received = run(ALLTOALL, packing.pack(values), f"{name}.parts")
    mine = packing.add_up(received, factor)
    packing.unpack(run(ALLGATHER, mine[None], f"{name}.mean"), values)


@functools.cache
def _noise() -> Array:
    """Numbers in [0, 1), float32 (_NOISE,), the same on every rank."""
    return np.random.Generator(np.random.Philox(0)).random(_NOISE, dtype=np.float32)


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    """Horovod's library with the loops of ``Int8`` in it, as ``hvdkit install`` builds it: the same bits, sooner."""
    for name in ("horovod.torch.mpi_ops", "horovod.tensorflow.mpi_ops"):
        library: ctypes.CDLL | None = getattr(getattr(sys.modules.get(name), "_basics", None), "MPI_LIB_CTYPES", None)
        if library is not None and hasattr(library, "horovod_int8_round"):
            pointer = ctypes.c_void_p
            library.horovod_int8_round.argtypes = [pointer, pointer, pointer, pointer, ctypes.c_size_t]
            library.horovod_int8_round.restype = ctypes.c_bool
            library.horovod_int8_values.argtypes = [pointer, pointer, pointer, ctypes.c_size_t]
            library.horovod_int8_values.restype = None
            return library
    return None


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


# What was rounded away, by the name of a gradient -----------------------------------------------------------------

_KEPT: dict[str, tuple[weakref.ref[Int8], int, int]] = {}
"""Whose it is, and from where to where; of gradients that all ranks of the job average."""
_MADE: dict[str, tuple[Any, Packing]] = {}
_RESTORED: dict[str, tuple[Array, int]] = {}
"""From a checkpoint, until the gradient of this name is packed: values, and how often noise had been drawn."""


def new_packing(
    compression: str, pieces: Sequence[tuple[str, int]], rank: int, ranks: int, *, dtype: Any = np.float32, saves: bool
) -> Packing:
    """A packing that goes on with what was kept of these gradients, here before or in a restored checkpoint.

    Args:
        pieces: name and size of each gradient in the vector; names are the same when the program runs again.
        saves: whether these are all ranks of the job, and checkpoints hold what is kept.
    """
    length = sum(size for _, size in pieces)
    if compression != "int8":
        return Halves(length, ranks, dtype, bfloat16=compression == "bf16")
    made, start = Int8(length, rank, ranks), 0
    for name, size in pieces:
        values, drawn = _known(name)
        if len(values) == size:
            made.kept[start : start + size] = values
            made.drawn = max(made.drawn, drawn)
        if saves:
            _KEPT[name] = weakref.ref(made), start, start + size
        start += size
    return made


def packing_of(compression: str, name: str, length: int, communicator: Communicator, *, saves: bool = True) -> Packing:
    """The packing of this name, the same one in every step as long as the ranks are as many; see ``new_packing``."""
    rank, ranks = communicator.rank(), communicator.size()
    key, made = (compression, length, rank, ranks), _MADE.get(name)
    if made is None or made[0] != key:
        made = _MADE[name] = key, new_packing(compression, [(name, length)], rank, ranks, saves=saves)
    return made[1]


def drop(prefix: str) -> None:
    """Keep nothing more of what ``packing_of`` made for names that begin so."""
    for name in [name for name in _MADE if name.startswith(prefix)]:
        del _MADE[name]
        _KEPT.pop(name, None)


def _known(name: str) -> tuple[Array, int]:
    """What is kept of a gradient, and how often noise was drawn; nothing of an unknown one."""
    if name in _RESTORED:
        return _RESTORED.pop(name)
    holder, start, stop = _KEPT.get(name, (None, 0, 0))
    packing = None if holder is None else holder()
    return (np.zeros(0, np.float32), 0) if packing is None else (packing.kept[start:stop], packing.drawn)


def to_save(communicator: Communicator) -> dict[str, Array]:
    """What the ranks keep, for a checkpoint on any number of ranks: the mean, which every rank then has. A collective.

    The sum over the ranks stays, and so does what is added to the next gradients. Empty where some rank keeps none.
    """
    names = sorted(_KEPT)
    fewest, most = communicator.allreduce([len(names), -len(names)], "hvdkit.kept.names", op="min").tolist()
    if not names or fewest != -most:  # in an elastic job a new rank has averaged nothing yet
        return {}
    lives = communicator.allreduce([int(_KEPT[name][0]() is not None) for name in names], "hvdkit.kept.lives", op="min")
    parts, drawn = [], []
    for name, living in zip(names, lives, strict=True):
        holder, start, stop = _KEPT[name]
        packing = holder()
        if living and packing is not None:
            parts.append((name, packing.kept[start:stop]))
            drawn.append(packing.drawn)
    flat = np.concatenate([np.zeros(0, np.float32), *(values for _, values in parts)])
    mean = (communicator.allreduce(flat, "hvdkit.kept") / np.float32(communicator.size())).astype(np.float32)
    start = 0
    for _, values in parts:
        values[:] = mean[start : start + len(values)]
        start += len(values)
    sizes = np.array([len(values) for _, values in parts], np.int64)
    return {"names": np.array([name for name, _ in parts]), "sizes": sizes, "drawn": np.array(drawn), "values": mean}


def restore(saved: dict[str, Array]) -> None:
    """Go on with what ``to_save`` returned; nothing is kept of gradients that it does not name."""
    _RESTORED.clear()
    if saved:
        ends = np.cumsum(saved["sizes"])
        parts = np.split(saved["values"], ends[:-1])
        for name, values, drawn in zip(saved["names"].tolist(), parts, saved["drawn"].tolist(), strict=True):
            _RESTORED[name] = values, drawn
    for name, (holder, start, stop) in _KEPT.items():
        packing = holder()
        if packing is None:
            continue
        values, drawn = _RESTORED.pop(name, (np.zeros(stop - start, np.float32), 0))
        packing.kept[start:stop], packing.drawn = values, drawn


# Which compression shortens a step over this network: compression="auto" ---------------------------------------------
#
# A trial of the training's own steps. Kinds of compression take turns, so that what else the machines and the network
# do meets all of them. The time from the begin of one exchange to that of the next is a step's, on its slowest rank.

_WARM_UP, _ROUNDS = 2, 7  # a kind makes its buffers in the first round, and Horovod knows its names from the second on
_SHORTER = 0.95
_LOG = logging.getLogger("hvdkit")
_TRIALS: weakref.WeakSet[CompressionTrial] = weakref.WeakSet()
clock = time.perf_counter


def kinds_of(*, bfloat16: bool) -> tuple[str, ...]:
    """What is tried, fewest roundings first; ``bfloat16``: whether it can be added up."""
    return ("none", "bf16", "int8") if bfloat16 else ("none", "int8")


class CompressionTrial:
    """Of one ``distribute``; every rank makes the same calls. Gradients travel as its ``kind`` in the next exchange.

    Args:
        kinds: of compression; the first is "none", and each rounds more than the one before.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds, count = kinds, len(kinds)
        # A round begins with another kind than the one before: something may happen in every third step.
        self._turns = [(turn + turn // count) % count for turn in range((_WARM_UP + _ROUNDS) * count)]
        self.start()
        _TRIALS.add(self)

    def start(self) -> None:
        """Begin anew: the ranks are others."""
        self._begins, self._ended, self._begun = np.zeros(len(self._turns) + 1), 0, False
        self.kind, self.over = self._kinds[0], False

    def begin(self) -> None:
        """An exchange begins; again, where an error ended it before anything was sent."""
        if not self.over:
            self._begins[self._ended], self._begun = clock(), True

    def end(self) -> Array | None:
        """It has ended, where one had begun; after the last one what this rank found, (steps,), for ``decide``."""
        if not self._begun:
            return None
        self._ended, self._begun = self._ended + 1, False
        self.kind = self._kinds[self._turns[self._ended]] if self._ended < len(self._turns) else self._kinds[0]
        return -np.diff(self._begins) if self._ended == len(self._begins) else None

    def end_on(self, communicator: Communicator) -> bool:
        """``end``, and ``decide`` where it is the last one, a collective; whether it has been decided now."""
        mine = self.end()
        if mine is not None:
            found = communicator.allreduce(mine, "hvdkit.auto", op="min")
            self.decide(found, says=communicator.rank() == 0)
        return mine is not None

    def turn(self, communicator: Communicator) -> bool:
        """As ``end_on`` for the exchange before, if any, and the next one begins."""
        decided = self.end_on(communicator)
        self.begin()
        return decided

    def decide(self, found: Array, *, says: bool) -> None:
        """Choose for all steps to come, by the minimum over the ranks of what they found; one rank says it."""
        count = len(self._kinds)
        rounds = -found.reshape(-1, count)[_WARM_UP:]
        order = np.reshape(self._turns, (-1, count))[_WARM_UP:]
        times = np.take_along_axis(rounds, np.argsort(order, axis=1), axis=1)  # (rounds, kinds)
        best = 0
        for kind in range(1, count):  # one that rounds more has to be shorter by so much in three of four rounds
            if np.quantile(times[:, kind] / times[:, best], 0.75) <= _SHORTER:
                best = kind
        self.kind, self.over = self._kinds[best], True
        if says:
            medians = zip(self._kinds, np.median(times, axis=0).tolist(), strict=True)
            shown = ", ".join(f"{1000 * seconds:.4g} ms with {kind!r}" for kind, seconds in medians)
            _LOG.warning('hvdkit: compression="auto" takes %r from now on: a step takes %s.', self.kind, shown)


def start_anew() -> None:
    """Horovod has started anew with other ranks: try again."""
    for trial in _TRIALS:
        trial.start()
