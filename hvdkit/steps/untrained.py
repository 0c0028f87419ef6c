"""Do all ranks hold the same untrained state: masks, codebooks, centres, counters, frozen weights?

Averaged gradients keep weights equal. Nothing keeps equal what a forward pass or a random generator writes. One process
would have one mask, and a codebook made from the samples of all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.core.communicator import Communicator
from hvdkit.errors import AgreementError
from hvdkit.steps import agreement

Array = npt.NDArray[Any]

_LOOKS = 2
"""Changes from one step to the next that tell what accumulates from what is drawn anew."""
_UNKNOWN, _CONSTANT, _ACCUMULATES, _NEW = range(4)
_SMALL = 16
"""Numbers below which a correlation says little."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank's untrained state before a step.

    Attributes:
        rows: "name type shape" of each part.
        digests: int64 (len(rows),), of the values.
        values: of the suspects, by row, float64; and the machine epsilon of each one's type, 0 for integers.
        frozen: rows of weights that are not trained.
    """

    rows: Sequence[str]
    digests: npt.NDArray[np.int64]
    values: Mapping[str, tuple[Array, float]] = field(default_factory=dict)
    frozen: Collection[str] = ()

    def mark(self) -> float:
        """An integer below 2**20 that stands for names and values."""
        return float(agreement.digest(self.table()) & 0xFFFFF)

    def table(self) -> npt.NDArray[np.int64]:
        """As of ``agreement.value_table``."""
        return agreement.value_table(self.rows, self.digests)


@dataclass(slots=True)
class _Suspect:
    """A part that differs between ranks: this rank's last value, and the most that it has changed in one step."""

    value: Array
    looks: int = 0
    change: int = _CONSTANT

    def look(self, value: Array) -> None:
        self.looks += 1
        self.change, self.value = max(self.change, _change(self.value, value)), value


class UntrainedState:
    """What the ranks have seen of one model's untrained state. Every rank makes the same calls.

    A part that differs is looked at before the next steps, too. Noise that is drawn anew for each step may differ, as
    that of dropout does; what stays, or accumulates, is told once.

    Args:
        fix: what a program does to give every rank the root's values.
        own: what it does where each rank is to have its own.
        stacklevel: of the program's line that trains, above ``compare``.
    Attributes:
        suspects: rows whose values are wanted with the next look.
    """

    def __init__(self, fix: str, own: str, stacklevel: int) -> None:
        self.suspects: dict[str, _Suspect | None] = {}
        self._told: set[str] = set()
        self._fix, self._own, self._stacklevel = fix, own, stacklevel

    def compare(self, ranks: Communicator, seen: Seen) -> None:
        """Compare what the ranks have seen; a collective. With suspects left, look again before the next step.

        Raises:
            AgreementError: a mask or a frozen weight differs between ranks, and stays as it is; on every rank.
        """
        for row, (value, _) in seen.values.items():
            if (known := self.suspects.get(row)) is None:
                self.suspects[row] = _Suspect(value)
            else:
                known.look(value)
        tables = ranks.allgather(self._table(seen), "hvdkit.untrained")
        is_root = ranks.rank() == 0
        if (difference := agreement.first_difference([table[:, :1] for table in tables])) is not None:
            self.suspects = {}
            if "" not in self._told and is_root:
                fault = "hold different buffers or weights that no gradient trains"
                text = agreement.layout_error(difference, seen.rows, 0, fault, "register the same")
                warnings.warn(f"{text} {self._own}", stacklevel=self._stacklevel)
            self._told.add("")
            return
        constant: list[str] = []
        drifting: list[str] = []
        everyone = np.stack(tables)
        for place, row in enumerate(seen.rows):
            _, digests, changes, fixed, norms, sums = everyone[:, place].T
            if (digests == digests[0]).all() or row in self._told:
                self.suspects.pop(row, None)
            elif (changes == _UNKNOWN).any():
                self.suspects.setdefault(row, None)
            else:
                del self.suspects[row]
                if (changes == _NEW).any() or _is_rounding(norms, sums, 0 if fixed.all() else seen.values[row][1]):
                    continue
                self._told.add(row)
                name = row.partition(" ")[0]
                (constant if fixed.all() and (changes == _CONSTANT).all() else drifting).append(name)
        if constant:
            raise AgreementError(
                f"the ranks train different models: {_listed(constant)} differs between ranks, and no gradient changes "
                f"it; make it alike on every rank, from a generator seeded alike, or {self._fix}. {self._own}"
            )
        if drifting and is_root:
            warnings.warn(
                f"{_listed(drifting)} differs between ranks, and no gradient changes it: each rank makes it from its "
                "own samples or random numbers, where one process has one for all. Average over the ranks what it is "
                f"made from, or {self._fix}. {self._own}",
                stacklevel=self._stacklevel,
            )

    def _table(self, seen: Seen) -> npt.NDArray[np.int64]:
        """Of each part: its name, its value, how it changes, whether it is to stay, and two sums of a suspect's."""
        table = np.zeros((len(seen.rows), 6), dtype=np.int64)
        table[:, :2] = seen.table()
        for place, row in enumerate(seen.rows):
            suspect = self.suspects.get(row)
            if suspect is None:
                continue
            flat = suspect.value.reshape(-1)
            table[place, 2] = suspect.change if suspect.looks >= _LOOKS else _UNKNOWN
            table[place, 3] = row in seen.frozen or is_mask(flat)
            sums = np.array([np.linalg.norm(flat), flat @ np.cos(np.arange(len(flat)))])
            table[place, 4:] = sums.view(np.int64)
        return table


def is_mask(value: Array) -> bool:
    """Whether an array holds zeros and ones alone, and both."""
    return value.size > 1 and set(np.unique(value).tolist()) == {0, 1}


def _change(before: Array, now: Array) -> int:
    if np.array_equal(before, now, equal_nan=True):
        return _CONSTANT
    if before.shape != now.shape:
        return _NEW
    before, now = before.reshape(-1), now.reshape(-1)
    with np.errstate(all="ignore"):
        if before.size >= _SMALL and before.std() and now.std():
            return _ACCUMULATES if np.corrcoef(before, now)[0, 1] > 0.5 else _NEW
        moved, size = np.linalg.norm(now - before), max(np.linalg.norm(before), np.linalg.norm(now))
    return _ACCUMULATES if moved <= size / 4 else _NEW


def _is_rounding(norms: Array, sums: Array, epsilon: float) -> bool:
    """Whether values differ no more than processors of different kinds round; each rank's two sums as int64."""
    ours = np.stack([norms, sums]).copy().view(np.float64)
    allowed = max(8 * epsilon, 1e-6) * ours[0].max() if epsilon else 0.0
    return bool((np.ptp(ours, axis=1) <= allowed).all())


def _listed(names: Sequence[str]) -> str:
    others = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return " and ".join(names[:3]) + others
