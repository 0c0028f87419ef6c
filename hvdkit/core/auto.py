"""Which compression shortens a step over this network: a trial of the training's own steps (``compression="auto"``).

Kinds of compression take turns, so that what else the machines and the network do meets all of them. The time from the
begin of one exchange to that of the next is a step's, on its slowest rank.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.core.communicator import Communicator

Array = npt.NDArray[Any]
_WARM_UP, _ROUNDS = 2, 7  # a kind makes its buffers in the first round, and Horovod knows its names from the second on
_SHORTER = 0.95
_LOG = logging.getLogger("hvdkit")
_TRIALS: weakref.WeakSet[CompressionTrial] = weakref.WeakSet()
clock = time.perf_counter


def kinds_of(*, bfloat16: bool) -> tuple[str, ...]:
    """What is tried, fewest roundings first; ``bfloat16``: whether it can be added up."""
    return ("none", "bf16", "int8") if bfloat16 else ("none", "int8")


class CompressionTrial:
    """Of one ``distribute``; every rank makes the same calls.

    Args:
        kinds: of compression; the first is "none", and each rounds more than the one before.
    Attributes:
        kind: how gradients travel in the next exchange; it stays once the trial is ``over``.
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
