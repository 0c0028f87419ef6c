"""Do the ranks still hold the same parameters? Looked at now and then, so that ranks that have diverged stop.

Equal weights and equal gradients stay equal, whatever the optimizer. A broadcast left out, a learning rate or noise of
one rank's own, a step that one rank skips end that without a word. Values are compared to the rounding of their types,
not by bits as ``check_agreement`` does: processors of different kinds may round a step differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.core.communicator import Communicator
from hvdkit.errors import AgreementError
from hvdkit.steps.agreement import WARNING
from hvdkit.steps.untrained import Seen, UntrainedState

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
        names: of the parameters.
        roundings: the machine epsilon of each one's type.
        exchanges: so many; what processors of different kinds round differently adds up.
    Raises:
        AgreementError: parameters differ, or some ranks have not looked.
    """
    ranks, asked, looked = whole[:3]
    if WARNING or asked < ranks or not looked:  # a rank that had joined counts otherwise; a group of parameters left
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

    Args:
        untrained: what is known of the model's other state.
    Attributes:
        exchanges: how often gradients have been exchanged, the same number on every rank; the caller counts.
        due: the count at which it calls ``ask``.
        asks: whether to look before the step that is about to be taken, unless a fingerprint is pending.
        pending_fingerprint: see ``raise_if_diverged``, that are not compared yet.
        seen: the other state when it was taken.
    """

    def __init__(self, untrained: UntrainedState) -> None:
        self.exchanges, self.due = 0, 1
        self.asks = False
        self._untrained = untrained
        self.pending_fingerprint: Fingerprints | None = None
        self.seen: Seen | None = None

    def ask(self) -> None:
        """It is time to look, before the next step."""
        self.asks, self.due = True, next_due(self.exchanges)

    def compare(self, ranks: Communicator, names: Sequence[str], roundings: Sequence[float], call: str) -> None:
        """Compare the ranks' fingerprints, when some rank has one; a collective, to which one that joined adds zeros.

        Args:
            ranks: all that exchange gradients.
            names, roundings: see ``raise_if_diverged``; the same on every rank.
            call: names the collective.
        Raises:
            AgreementError: on every rank, see ``raise_if_diverged``.
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
        if WARNING or set(counts) != {ranks.size()} or self.seen is None:
            return
        if squares / counts[0] == (marks / counts[0]) ** 2:
            self._untrained.suspects.clear()
            return
        self._untrained.compare(ranks, self.seen)
        self.asks = bool(self._untrained.suspects)
