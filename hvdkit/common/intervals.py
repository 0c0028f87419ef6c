"""Medians and their intervals by the bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = Sequence[float] | NDArray[np.float64]
CONFIDENCE = 0.95
RESAMPLES = 4000
ENOUGH_REPEATS = 5
"""From so many repeats on the interval of a median holds what it says, nearly; with fewer it is their range."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval.

    Attributes:
        value: the estimate.
        low, high: ends of the interval; None where there is one repeat only, which says nothing about noise.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def scaled(self, factor: float) -> Estimate:
        """The estimate in another unit; factor > 0."""
        ends = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, *ends)


def resampled_medians(samples: Samples, rng: np.random.Generator, count: int = RESAMPLES) -> NDArray[np.float64]:
    """Medians of ``count`` samples drawn from these with replacement, in memory that does not grow with them.

    The m-th smallest of n draws is the value at place floor(n * U), U the m-th smallest of n uniform numbers, which has
    a Beta distribution; the next one is the smallest of the n - m that are above it.

    Source: H. A. David and H. N. Nagaraja, Order Statistics (2003), sections 2.1 and 2.5.
    """
    ordered = np.sort(np.asarray(samples, dtype=float))
    n = len(ordered)
    m = (n + 1) // 2
    first = rng.beta(m, n - m + 1, count)
    lower = ordered[_places(first, n)]
    if n % 2:
        return np.asarray(lower)
    second = first + (1 - first) * (1 - rng.random(count) ** (1 / (n - m)))
    return np.asarray((lower + ordered[_places(second, n)]) / 2)


def _places(uniform: NDArray[np.float64], n: int) -> NDArray[np.intp]:
    return np.minimum((uniform * n).astype(np.intp), n - 1)


def estimate(value: float, resampled: NDArray[np.float64], *, alone: bool = False) -> Estimate:
    """A value with the percentile interval of what resampling gave; without one where a sample has one value only.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. BCa (chapter 14) is of no help
        here: its acceleration is a jackknife, which fails for medians (chapter 11).
    """
    finite = resampled[np.isfinite(resampled)]
    if alone or len(finite) == 0:
        return Estimate(value)
    low, high = np.quantile(finite, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))


def ratio(numerator: Samples, denominator: Samples, rng: np.random.Generator, factor: float = 1.0) -> Estimate:
    """The ratio of two medians above 0, times ``factor``; the samples are independent and resampled each for itself."""
    value = factor * float(np.median(numerator) / np.median(denominator))
    with np.errstate(divide="ignore", invalid="ignore"):  # of a resample with a median of 0
        resampled = factor * resampled_medians(numerator, rng) / resampled_medians(denominator, rng)
    return estimate(value, resampled, alone=min(len(numerator), len(denominator)) < 2)


def median(samples: Samples, rng: np.random.Generator) -> Estimate:
    """The median of the samples."""
    return estimate(float(np.median(samples)), resampled_medians(samples, rng), alone=len(samples) < 2)
