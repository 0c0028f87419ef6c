"""Medians and their intervals by the bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def resampled_medians(samples: Sequence[float], rng: np.random.Generator) -> NDArray[np.float64]:
    """Medians of ``RESAMPLES`` samples that are drawn from these with replacement."""
    values = np.asarray(samples, dtype=float)
    return np.asarray(np.median(values[rng.integers(len(values), size=(RESAMPLES, len(values)))], axis=1))


def estimate(value: float, resampled: NDArray[np.float64], *, alone: bool = False) -> Estimate:
    """A value with the percentile interval of what resampling gave.

    Args:
        value: from the samples themselves.
        resampled: from each resample; those that are not finite are left out.
        alone: a sample behind it has one value only: no interval.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. BCa (chapter 14) is of no help
        here: its acceleration is a jackknife, which fails for medians (chapter 11).
    """
    finite = resampled[np.isfinite(resampled)]
    if alone or len(finite) == 0:
        return Estimate(value)
    low, high = np.quantile(finite, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))


def ratio(
    numerator: Sequence[float], denominator: Sequence[float], rng: np.random.Generator, factor: float = 1.0
) -> Estimate:
    """The ratio of two medians, times ``factor``; the samples are independent and resampled each for itself."""
    value = factor * float(np.median(numerator) / np.median(denominator))
    resampled = factor * resampled_medians(numerator, rng) / resampled_medians(denominator, rng)
    return estimate(value, resampled, alone=min(len(numerator), len(denominator)) < 2)


def median(samples: Sequence[float], rng: np.random.Generator) -> Estimate:
    """The median of the samples."""
    return estimate(float(np.median(samples)), resampled_medians(samples, rng), alone=len(samples) < 2)
