"""How measured times are spread: percentiles that the sample supports, the distribution with its band, outliers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.intervals import CONFIDENCE, Estimate, median

Floats = NDArray[np.float64]
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
LEAST = {"p50": 1, "p90": 10, "p99": 100, "p99.9": 1000}
"""How many samples a percentile needs: as many as make one sample beyond it likely. With fewer it is the maximum."""
ENOUGH_FOR_OUTLIERS = 8
FENCE = 3.0


@dataclass(frozen=True, slots=True)
class Times:
    """A set of times in seconds.

    Attributes:
        count: how many.
        mean, min, max: of them.
        p50: the median, with its interval.
        p90, p99, p999: percentiles, by linear interpolation; None with fewer than 10, 100, 1000 samples.
    """

    count: int
    mean: float
    min: float
    max: float
    p50: Estimate
    p90: float | None
    p99: float | None
    p999: float | None


def times(values: Floats, rng: np.random.Generator, independent: int | None = None) -> Times:
    """What the times are like.

    Args:
        values: at least one, in seconds.
        rng: for the interval of the median.
        independent: how many of them tell something new, where others repeat them; then there is no interval.
    """
    enough = len(values) if independent is None else independent
    found = {
        name: float(np.quantile(values, share)) if enough >= LEAST[name] else None
        for name, share in PERCENTILES.items()
    }
    return Times(
        count=len(values),
        mean=float(values.mean()),
        min=float(values.min()),
        max=float(values.max()),
        p50=median(values, rng) if independent is None else Estimate(float(np.median(values))),
        p90=found["p90"],
        p99=found["p99"],
        p999=found["p99.9"],
    )


@dataclass(frozen=True, slots=True)
class EmpiricalDistribution:
    """The empirical distribution of a set of times.

    Attributes:
        values: in seconds, from the smallest to the largest.
        shares: of each value: the share of the samples that are at most as large.
        low, high: the ends of the band at each value; it holds the true distribution everywhere at once with 95 %
            probability.
        band: half its height.
    """

    values: Floats
    shares: Floats
    low: Floats
    high: Floats
    band: float


def distribution(values: Floats, independent: int | None = None) -> EmpiricalDistribution:
    """The distribution with its band, which supposes that the samples are independent.

    Args:
        values: at least one.
        independent: how many of them tell something new, where others repeat them; default: all.

    Source: the inequality of Dvoretzky, Kiefer and Wolfowitz (Annals of Mathematical Statistics 27, 1956) with the
        constant of Massart (Annals of Probability 18, 1990): P(sup |F_n - F| > e) <= 2 exp(-2 n e^2).
    """
    band = math.sqrt(math.log(2 / (1 - CONFIDENCE)) / (2 * max(1, independent or len(values))))
    shares = np.arange(1, len(values) + 1) / len(values)
    low, high = np.clip(shares - band, 0, 1), np.clip(shares + band, 0, 1)
    return EmpiricalDistribution(np.sort(values), shares, low, high, band)


def fence(values: Floats) -> float:
    """Above it a time is an outlier: the upper quartile plus three times the distance of the quartiles.

    Returns:
        Seconds; infinity with fewer than ``ENOUGH_FOR_OUTLIERS`` samples.
    Source: J. W. Tukey, Exploratory Data Analysis (1977), chapter 2: "far out".
    """
    if len(values) < ENOUGH_FOR_OUTLIERS:
        return math.inf
    lower, upper = np.quantile(values, [0.25, 0.75])
    return float(upper + FENCE * (upper - lower))
