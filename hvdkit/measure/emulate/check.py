"""What every rank gives and what every rank must get: integers whose sums every type holds exactly.

Element i of rank r in trial t is (h(i) + r + t) mod m, with h a fixed mixing of the position and m so small that the
sum over all ranks, and with it every partial sum in any order, is exact in the type. What must come out follows from
h(i) alone, by a table of m sums, so that checking an element costs one look-up. A rank that counts twice, an element
that came to another place or the result of another trial are other numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.core.communicator import shares

ALLREDUCE, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL = COLLECTIVES = (
    "allreduce",
    "reduce_scatter_all_gather",
    "broadcast",
    "all_to_all",
)
ROOT = 0
"""The rank whose values a broadcast brings to the others."""

EXACT: dict[str, int] = {
    "bfloat16": 2**8,
    **{name: 2 ** (np.finfo(name).nmant + 1) for name in ("float16", "float32", "float64")},
    **{name: int(np.iinfo(name).max) for name in ("int8", "uint8", "int16", "uint16", "int32", "int64")},
}
"""Up to here a type holds every whole number from 0 on."""
ROUNDING = {"none": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 6 / 127}
"""Of the largest number and by rank: how far a sum may be off. Halves round each sum on the way; int8 twice, and then
adds what was lost before."""
_MOST_VALUES = 251
_BLOCK = 1 << 20
_MIXER = 2654435761  # Knuth, The Art of Computer Programming 3 (1998), section 6.4: multiplicative hashing


def storage(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds the elements; a bfloat16, which NumPy does not know, as the 16 bits that it is."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def largest(collective: str, dtype: str, ranks: int) -> int:
    """The largest number that each rank may give, so that the type holds all sums exactly; 0 where there is none."""
    return EXACT[dtype] // (ranks if collective in (ALLREDUCE, REDUCE_SCATTER) else 1)


class Values:
    """The values of one collective of a plan, of which each rank gives so many elements.

    They overflow where ``largest`` finds no number: then nothing can be checked.
    """

    def __init__(self, collective: str, elements: int, dtype: str, ranks: int) -> None:
        self._collective, self._dtype, self._ranks = collective, dtype, ranks
        self._modulus = min(_MOST_VALUES, max(1, largest(collective, dtype, ranks)) + 1)
        self._mixed = np.empty(elements, np.uint8)
        for start in range(0, elements, _BLOCK):  # positions take eight times the memory
            positions = np.arange(start, min(start + _BLOCK, elements), dtype=np.uint64)
            self._mixed[start : start + _BLOCK] = (positions * _MIXER >> np.uint64(16)) % np.uint64(self._modulus)

    def given(self, rank: int, trial: int) -> NDArray[Any]:
        """What a rank gives, shape (elements,)."""
        return self._looked_up(self._numbers(rank + trial), self._mixed)

    def expected(self, rank: int, trial: int) -> NDArray[Any]:
        """What a rank must get: shape (elements,), of an all-to-all (ranks * its share of the elements,)."""
        if self._collective == BROADCAST:
            return self.given(ROOT, trial)
        numbers = [self._numbers(other + trial) for other in range(self._ranks)]
        if self._collective == ALL_TO_ALL:
            parts = shares(len(self._mixed), self._ranks)
            start = sum(parts[:rank])
            own = self._mixed[start : start + parts[rank]]
            return np.concatenate([self._looked_up(of_sender, own) for of_sender in numbers])
        return self._looked_up(np.sum(numbers, axis=0), self._mixed)

    def wrong(self, result: NDArray[Any], rank: int, trial: int, compression: str = "none") -> str | None:
        """The first element of a rank's result that is not what it must be, in words; None when all are right.

        What was compressed may be off by its ``ROUNDING``.
        """
        expected = self.expected(rank, trial)
        if result.shape != expected.shape:
            return f"it has {len(result)} elements, expected {len(expected)}"
        most = ROUNDING[compression] * self._modulus * self._ranks * (1 if compression == "int8" else self._ranks)
        differ = ~(np.abs(result - expected) <= most) if most else result != expected
        if not differ.any():
            return None
        index = int(np.argmax(differ))
        got, wanted = self._number(result, index), self._number(expected, index)
        count = int(np.count_nonzero(differ))
        return f"element {index} is {got:g}, expected {wanted:g} ({count} of {len(expected)} elements wrong)"

    def _numbers(self, shift: int) -> NDArray[np.int64]:
        """The value at each mixed position."""
        return (np.arange(self._modulus, dtype=np.int64) + shift) % self._modulus

    def _looked_up(self, numbers: NDArray[np.int64], positions: NDArray[np.uint8]) -> NDArray[Any]:
        if self._dtype == "bfloat16":
            table = (numbers.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        else:
            with np.errstate(over="ignore"):  # only without a check
                table = numbers.astype(storage(self._dtype))
        return np.asarray(np.take(table, positions))

    def _number(self, array: NDArray[Any], index: int) -> float:
        if self._dtype == "bfloat16":
            return float((array[index : index + 1].astype(np.uint32) << np.uint32(16)).view(np.float32)[0])
        return float(array[index])
