"""Medians, ratios of them, and whether their intervals hold what they say."""

import math

import numpy as np
import pytest

from hvdkit.common import intervals


@pytest.mark.parametrize("n", [1, 2, 5, 8, 31], ids=str)
def test_fast_resampling_has_the_distribution_of_plain_resampling(n):
    values = np.random.default_rng(2).random(n)
    fast = np.sort(intervals.resampled_medians(values, np.random.default_rng(3)))
    plain = np.sort(np.median(np.random.default_rng(4).choice(values, (intervals.RESAMPLES, n)), axis=1))
    points = np.unique(np.concatenate([fast, plain]))
    apart = np.searchsorted(fast, points, "right") / len(fast) - np.searchsorted(plain, points, "right") / len(plain)
    assert np.abs(apart).max() < 1.9 * math.sqrt(2 / len(fast))  # Kolmogorov-Smirnov, 0.1 %


@pytest.mark.parametrize(("repeats", "least"), [(5, 0.88), (9, 0.9), (15, 0.9), (40, 0.9)])
def test_intervals_of_medians_hold_what_they_say(repeats, least):
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(300):
        found = intervals.median(np.exp(rng.normal(0, 0.1, repeats)), rng)
        held += found.low <= 1 <= found.high
    assert least <= held / 300 <= 0.995


def test_the_interval_of_a_ratio_holds_what_it_says():
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(300):
        found = intervals.ratio(np.exp(rng.normal(0, 0.1, 7)), 2 * np.exp(rng.normal(0, 0.1, 7)), rng)
        held += found.low <= 0.5 <= found.high
    assert 0.9 <= held / 300 <= 0.999


def test_one_outlier_of_five_does_not_move_the_median():
    rng = np.random.default_rng(5)
    assert intervals.median([1.0, 1.0, 1.0, 1.0, 50.0], rng).value == 1.0
