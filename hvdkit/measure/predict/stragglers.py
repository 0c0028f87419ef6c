"""How long the slowest of n ranks keeps the others waiting, from how far apart the ranks of a measurement arrived.

Measured is the skew of r ranks: from the first one's arrival to the last one's. Delays that are independent and
exponential make it the largest of r - 1 of them (the first arrival being the start of all others; Rényi, Acta
Mathematica Hungarica 4 (1953)), so that its distribution F gives that of n ranks as F^((n-1)/(r-1)), which is used here
for any delays. The expected largest follows from F's quantiles. Above the measured 90 % quantile F is a generalised
Pareto distribution (Pickands, Annals of Statistics 3(1) (1975)) by probability-weighted moments (Hosking, Wallis,
Technometrics 29(3) (1987)), its shape kept within 0.5 of the exponential's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.measure.predict.link import Array

if TYPE_CHECKING:
    from hvdkit.measure.emulate.results import EmulateResults

_BODY = 0.9
_ENOUGH = 50
"""Skews from which on a tail is fitted; with fewer the longest one seen is the longest that there is."""
_SHAPE = 0.5
_GRID = (np.arange(4000) + 0.5) / 4000


@dataclass(frozen=True, slots=True)
class Delays:
    """What was measured.

    Attributes:
        ranks: whose arrivals were compared, >= 2; 0 when nothing was measured.
        skews: seconds, one for each step.
        injected: some of them were asked for (`hvdkit emulate --straggler`, `--delay`).
    """

    ranks: int
    skews: Array
    injected: bool = False

    @property
    def has_tail(self) -> bool:
        """Whether there are enough skews for a tail; else the longest one seen is the longest that there is."""
        return len(self.skews) >= _ENOUGH

    def power(self, n: int) -> float:
        """How many times as many delays n ranks have."""
        return (n - 1) / (self.ranks - 1)

    def extrapolates(self, n: int) -> bool:
        """Whether the largest of n ranks' delays is expected beyond all that was measured."""
        return self.ranks > 0 and self.power(n) > len(self.skews)

    def expected_s(self, n: int) -> float:
        """Seconds that the slowest of n ranks is behind the first, on average; 0 for n = 1."""
        return _largest(self.skews, self.power(n)) if self._known(n) else 0.0

    def draws_s(self, n: int, count: int, rng: np.random.Generator) -> Array:
        """The same from ``count`` resamples."""
        if not self._known(n):
            return np.zeros(count)
        chosen = (rng.choice(self.skews, len(self.skews)) for _ in range(count))
        return np.array([_largest(skews, self.power(n)) for skews in chosen])

    def _known(self, n: int) -> bool:
        return n > 1 and self.ranks > 1 and len(self.skews) > 0


def measured(results: Sequence[EmulateResults]) -> Delays:
    """The skews of the measurement with the most ranks; of each step the largest."""
    known = [one for one in results if one.samples and one.asked.ranks > 1]
    if not known:
        return Delays(0, np.array([]))
    most = max(one.asked.ranks for one in known)
    steps: dict[tuple[int, int], float] = {}
    injected = False
    for number, one in enumerate(known):
        if one.asked.ranks == most:
            injected = injected or bool(one.asked.straggler_s or one.asked.delay)
            for sample in one.samples:
                key = (number, sample.trial)
                steps[key] = max(steps.get(key, 0.0), sample.skew_s)
    return Delays(most, np.array(list(steps.values())), injected)


def _largest(skews: Array, power: float) -> float:
    """The mean of the largest of ``power`` draws: the mean over v of Q(v^(1/power)), Q being the quantiles."""
    ordered = np.sort(skews)
    above = -np.expm1(np.log(_GRID) / power)  # 1 - v^(1/power), exact also near 0
    inside = ordered[np.clip(np.ceil((1 - above) * len(ordered)).astype(int) - 1, 0, len(ordered) - 1)]
    if len(ordered) < _ENOUGH:
        return float(inside.mean())
    start = float(np.quantile(ordered, _BODY))
    shape, scale = _tail(ordered[ordered > start] - start)
    if scale == 0:
        return float(inside.mean())
    share = np.minimum(above / (1 - _BODY), 1.0)
    beyond = -np.log(share) if abs(shape) < 1e-6 else np.expm1(-shape * np.log(share)) / shape
    return float(np.where(above < 1 - _BODY, start + scale * beyond, inside).mean())


def _tail(excess: Array) -> tuple[float, float]:
    """Shape and scale of a generalised Pareto distribution; scale 0 where there is nothing to fit."""
    if len(excess) < 2:
        return 0.0, 0.0
    ordered = np.sort(excess)
    mean = float(ordered.mean())
    place = (np.arange(1, len(ordered) + 1) - 0.35) / len(ordered)
    weighted = float(np.mean((1 - place) * ordered))
    shape = 2 - mean / (mean - 2 * weighted) if mean > 2 * weighted else _SHAPE
    shape = min(max(shape, -_SHAPE), _SHAPE)
    return shape, mean * (1 - shape)
