"""How much faster one setting is than another, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Speedup:
    """Seconds of the default divided by those of a setting: above 1 the setting is faster.

    Attributes:
        ratio: geometric mean over the pairs.
        low, high: ends of the confidence interval of ``ratio``; 0 and infinity where one pair says nothing about them.
        confidence: of the interval, between 0 and 1.
        pairs: number of pairs, >= 1.
    """

    ratio: float
    low: float
    high: float
    confidence: float
    pairs: int


def speedup(pairs: Sequence[tuple[float, float]], confidence: float) -> Speedup:
    """The speed-up with its confidence interval: Student's t on the logarithms of the paired ratios.

    Args:
        pairs: seconds of the default and of the setting, run one soon after the other; at least one pair, all > 0.
        confidence: between 0 and 1.
    Raises:
        InvalidArgumentError: no pair, or a time that is not positive.
    Source: W. S. Gosset ("Student"), The probable error of a mean, Biometrika 6 (1908); the geometric mean as the mean
        of ratios: Fleming and Wallace, How not to lie with statistics, Communications of the ACM 29(3) (1986).
    """
    if not pairs or any(not (0 < seconds < math.inf) for pair in pairs for seconds in pair):
        raise InvalidArgumentError(f"A speed-up needs pairs of seconds above 0, got {list(pairs)}.")
    logs = np.log([default / other for default, other in pairs])
    mean, count = float(np.mean(logs)), len(pairs)
    if count == 1:
        return Speedup(math.exp(mean), 0.0, math.inf, confidence, count)
    from scipy.special import stdtrit

    half = float(stdtrit(count - 1, (1 + confidence) / 2) * np.std(logs, ddof=1) / math.sqrt(count))
    return Speedup(math.exp(mean), _exp(mean - half), _exp(mean + half), confidence, count)


def each_of(count: int, together: float) -> float:
    """Confidence of each of ``count`` intervals so that all hold together with ``together`` (Bonferroni; Dunn 1961)."""
    return 1 - (1 - together) / count


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
