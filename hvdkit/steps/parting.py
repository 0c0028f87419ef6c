"""Do the ranks still hold the same parameters? Looked at now and then, so that ranks that have parted do not train on.

Equal weights and equal gradients stay equal, whatever the optimizer. A broadcast left out, a learning rate or noise of
one rank's own, a step that one rank skips end that without a word. Values are compared to the rounding of their types,
not by bits as ``check_agreement`` does: processors of different kinds may round a step differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvdkit.errors import AgreementError
from hvdkit.steps.collectives import Collectives

Facts = npt.NDArray[np.float64]
_EVERY = 1000
_FIX = (
    "begin with broadcast_state on every rank, and let every rank take the same steps, with the same learning rate and "
    "with the gradients as backward() left them; check_agreement names the ranks"
)


class Parting:
    """When to look at the parameters, what was seen, and whether it is the same on all ranks.

    It looks before the steps 1, 2, 4, 8 and so on, and every thousandth; the next exchange of gradients compares.

    Attributes:
        noted: what this rank saw and has not compared yet, see ``compare``.
    """

    def __init__(self) -> None:
        self._exchanges = 0
        self._asks = False
        self.noted: Facts | None = None

    def exchanged(self) -> None:
        """Gradients have been exchanged: the same number of times on every rank."""
        self._exchanges += 1
        is_power_of_two = self._exchanges & (self._exchanges - 1) == 0
        self._asks = self._asks or is_power_of_two or self._exchanges % _EVERY == 0

    def wants_note(self) -> bool:
        """Whether to look before the step that is about to be taken."""
        return self._asks and self.noted is None

    def compare(self, ranks: Collectives, names: Sequence[str], roundings: Sequence[float], call: str) -> None:
        """Compare what the ranks noted; a collective, when some rank has noted something.

        A rank that has joined (``join``) adds zeros, and is not counted.

        Args:
            ranks: all that exchange gradients.
            names: of the parameters, the same on every rank.
            roundings: the machine epsilon of each one's type.
            call: names the collective.
        Raises:
            AgreementError: on every rank: parameters differ, or some ranks have taken a step that others left out.
        """
        seen, self.noted, self._asks = self.noted, None, False
        if seen is not None and seen.shape != (len(names), 2):
            seen = None
        mine = np.zeros((len(names), 2)) if seen is None else seen
        counts, sums, squares = np.split(
            ranks.sum(np.concatenate([[1.0, seen is not None], mine.ravel(), mine.ravel() ** 2]), call),
            [2, 2 + mine.size],
        )
        if counts[1] < counts[0]:
            raise AgreementError(
                f"some ranks have taken a step that {counts[0] - counts[1]:.0f} of {counts[0]:.0f} ranks left out; "
                "decide whether to step on what all ranks see: .grad after backward(), or average_metrics of the loss."
            )
        means = (sums / counts[0]).reshape(-1, 2)
        spreads = np.sqrt(np.maximum((squares / counts[0]).reshape(-1, 2) - means**2, 0))
        # The squares cancel to about 1e-8 of the norm.
        allowed = np.maximum(8 * np.array(roundings), 1e-7)[:, None] * means[:, :1]
        apart = np.flatnonzero((spreads > allowed).any(axis=1))
        if len(apart):
            raise AgreementError(
                f"the ranks train apart: their values of {names[apart[0]]} differ"
                f"{f', and those of {len(apart) - 1} other parameters' if len(apart) > 1 else ''}; {_FIX}."
            )
