"""Do the ranks still hold the same parameters, and the same of a model's other state? Looked at now and then.

Equal weights and equal gradients stay equal, whatever the optimizer. A broadcast left out, a learning rate or noise of
one rank's own, a step that one rank skips end that without a word. Values are compared to the rounding of their types,
not by bits as ``check_agreement`` does: processors of different kinds may round a step differently.

Nothing keeps equal what a forward pass or a random generator writes: masks, codebooks, centres, counters, frozen
weights. One process would have one mask, and a codebook made from the samples of all ranks.
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
Fingerprints = npt.NDArray[np.float64]
_EVERY = 1000
_FIX = (
    "begin with broadcast_state on every rank, and let every rank take the same steps, with the same learning rate and "
    "with the gradients as they were averaged; check_agreement names the ranks; where parameters differ on purpose, "
    "a CheckAgreement(..., on_disagreement='warn') lets them"
)


def is_due(count: Any) -> Any:
    """Whether to look at this count of exchanges, >= 1: at 1, 2, 4, 8 and so on, and at every thousandth."""
    return (count & (count - 1) == 0) | (count % _EVERY == 0)


def next_due(count: int) -> int:
    """The next count of exchanges at which to look."""
    return min(1 << count.bit_length(), (count // _EVERY + 1) * _EVERY)


def raise_if_diverged(whole: Fingerprints, names: Sequence[str], roundings: Sequence[float], exchanges: int) -> None:
    """Compare what the ranks saw, unless a ``CheckAgreement`` was told to warn of differences.

    Args:
        whole: the sum over the ranks of 1, of 1 where it was time for the rank to look, of 1 where it did, of its
            fingerprints, and of their squares. Fingerprints are float64 (n, 2): of each parameter its norm, and a sum
            of that size.
        roundings: the machine epsilon of each one's type.
        exchanges: so many; what processors of different kinds round differently adds up.
    Raises:
        AgreementError: parameters differ, or some ranks have not looked.
    """
    ranks, asked, looked = whole[:3]
    # A rank that had joined counts otherwise; or a group of parameters left.
    if agreement.WARNING or asked < ranks or not looked:
        return
    if looked < ranks:
        raise AgreementError(
            f"some ranks have taken a step that {ranks - looked:.0f} of {ranks:.0f} ranks left out; decide whether to "
            "step on what all ranks see: the averaged gradients, or average_metrics of the loss."
        )
    with np.errstate(invalid="ignore", over="ignore"):  # a training may have diverged
        means, squares = (whole[3:] / ranks).reshape(2, -1, 2)
        spreads = np.sqrt(np.maximum(squares - means**2, 0))
        # The squares cancel to some 1e-7 of the norm on hundreds of ranks.
        allowed = np.maximum(8 * np.array(roundings) * exchanges**0.5, 1e-6)[:, None] * means[:, :1]
        apart = np.flatnonzero((spreads > allowed).any(axis=1))
    if len(apart):
        others = f", and those of {len(apart) - 1} other parameters" if len(apart) > 1 else ""
        raise AgreementError(f"the ranks train apart: their values of {names[apart[0]]} differ{others}; {_FIX}.")


def require_same_exchange(whole: Fingerprints, gradients: Sequence[str]) -> None:
    """Raise an AgreementError unless the ranks are about to exchange the same gradients.

    Args:
        whole: the sum over the ranks of 1, of each one's mark, an integer below 2**20 that stands for what it
            exchanges, and of the marks' squares.
        gradients: the name of each gradient that this rank exchanges.
    """
    ranks, marks, squares = (float(one) for one in whole)
    if squares / ranks != (marks / ranks) ** 2:
        shown = ", ".join([*gradients[:3], *(["..."] if len(gradients) > 3 else [])])
        raise AgreementError(
            f"the ranks exchange different gradients, this rank those of {len(gradients)} variables ({shown}); build "
            "the same model on every rank, and ask for the same variables in the same order. In a compiled step, and "
            "of sparse rows, a gradient must be None on all ranks or on none."
        )


class DivergenceCheck:
    """When to look at the parameters, and what was seen; the next exchange of gradients compares it.

    The caller counts the ``exchanges`` of gradients, as many on every rank, and calls ``ask`` when they are as ``due``.
    """

    def __init__(self, untrained: UntrainedState) -> None:
        self.exchanges, self.due = 0, 1
        self.asks = False  # whether to look before the step that is about to be taken, unless a fingerprint is pending
        self._untrained = untrained  # what is known of the model's other state
        self.pending_fingerprint: Fingerprints | None = None  # that is not compared yet
        self.seen: Seen | None = None  # the other state when it was taken

    def ask(self) -> None:
        """It is time to look, before the next step."""
        self.asks, self.due = True, next_due(self.exchanges)

    def compare(self, ranks: Communicator, names: Sequence[str], roundings: Sequence[float], call: str) -> None:
        """Compare the ranks' fingerprints, when some rank has one; a collective, to which one that joined adds zeros.

        Args:
            ranks: all that exchange gradients.
            names, roundings: see ``raise_if_diverged``, which this calls; the same on every rank.
            call: names the collective.
        """
        seen, asked, self.pending_fingerprint, self.asks = self.pending_fingerprint, self.asks, None, False
        looked = seen is not None and len(seen) == len(names)
        mine = seen.ravel() if looked and seen is not None else np.zeros(2 * len(names))
        mark = 0.0 if self.seen is None else self.seen.mark()
        whole = ranks.allreduce(np.concatenate([[mark, mark**2, 1.0, asked, looked], mine, mine**2]), call)
        marks, squares, *counts = whole[:5].tolist()
        if counts[1] < counts[0]:
            self.exchanges, self.due = 0, 1  # on every rank, so that they count alike from now on
        raise_if_diverged(whole[2:], names, roundings, max(self.exchanges, 1))
        if agreement.WARNING or set(counts) != {ranks.size()} or self.seen is None:
            return
        if squares / counts[0] == (marks / counts[0]) ** 2:
            self._untrained.suspects.clear()
            return
        self._untrained.compare(ranks, self.seen)
        self.asks = bool(self._untrained.suspects)


# What no gradient trains ----------------------------------------------------------------------------------------------

_LOOKS = 2
"""Changes from one step to the next that tell what accumulates from what is drawn anew."""
_UNKNOWN, _CONSTANT, _ACCUMULATES, _NEW = range(4)
_SMALL = 16
"""Numbers below which a correlation says little."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank's untrained state before a step.

    ``values`` are those of the suspects, float64, each with the machine epsilon of its type, 0 for integers.
    """

    rows: Sequence[str]  # "name type shape" of each part
    digests: npt.NDArray[np.int64]  # (len(rows),), of the values
    values: Mapping[str, tuple[Array, float]] = field(default_factory=dict)  # by row
    frozen: Collection[str] = ()  # rows of weights that are not trained

    def mark(self) -> float:
        """An integer below 2**20 that stands for names and values."""
        return float(agreement.digest(self.table()) & 0xFFFFF)

    def table(self) -> agreement.Digests:
        """As of ``agreement.digest_table``."""
        return agreement.digest_table(self.rows, self.digests)


@dataclass(slots=True)
class _Suspect:
    """A part that differs between ranks: this rank's last value, and the most that it has changed in one step."""

    value: Array
    looks: int = 0
    change: int = _CONSTANT


class UntrainedState:
    """What the ranks have seen of one model's untrained state. Every rank makes the same calls.

    A part that differs is one of ``suspects``, and its value is wanted with the next look, too. Noise that is drawn
    anew for each step may differ, as that of dropout does; what stays, or accumulates, is told once.

    Args:
        fix: what a program does to give every rank the root's values.
        own: what it does where each rank is to have its own.
        stacklevel: of the program's line that trains, above ``compare``.
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
            known = self.suspects.get(row)
            if known is None:
                self.suspects[row] = _Suspect(value)
                continue
            known.looks += 1
            known.change, known.value = max(known.change, _change(known.value, value)), value
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
