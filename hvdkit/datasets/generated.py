"""The data sets that need no files: scikit-learn's bundled digits, and one made of random numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.extras import of_extra
from hvdkit.datasets.readers import Arrays

DIGITS_TEST_FRACTION = 0.2
DIGITS_BRIGHTEST = 16.0
SYNTHETIC_NOISE = 0.25


def digits(seed: int) -> Arrays:
    """1797 handwritten digits of 8 x 8 pixels; 80 % to train, 20 % held out, each digit in proportion.

    Args:
        seed: chooses the split; the same seed gives the same split on every rank and every machine.
    Raises:
        MissingFrameworkError: scikit-learn is missing or does not import.
    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, UCI repository.
    """
    with of_extra("examples", "digits comes with scikit-learn", ", or use the data set synthetic, which needs nothing"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    bundled = load_digits()
    images = (bundled.images / DIGITS_BRIGHTEST).astype(np.float32)[..., np.newaxis]
    labels = bundled.target.astype(np.int64)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=DIGITS_TEST_FRACTION, stratify=labels, random_state=seed
    )
    return Arrays(x_train, y_train, x_test, y_test)


def synthetic(n: int, shape: tuple[int, int, int], classes: int, seed: int) -> Arrays:
    """A pattern per class plus noise: small or large at will, and a network learns it.

    Args:
        n: training samples; the test set has a quarter as many, rounded up.
        shape: height, width, channels.
        classes: labels run from 0 to classes - 1, as evenly as n allows.
        seed: the same seed gives the same samples.
    """
    rng = np.random.default_rng(seed)
    patterns = rng.random((classes, *shape), dtype=np.float32)
    x_train, y_train = _noisy(rng, patterns, n)
    x_test, y_test = _noisy(rng, patterns, -(-n // 4))
    return Arrays(x_train, y_train, x_test, y_test)


def _noisy(
    rng: np.random.Generator, patterns: NDArray[np.float32], n: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    labels = rng.permutation(np.arange(n, dtype=np.int64) % len(patterns))
    images = rng.standard_normal((n, *patterns.shape[1:]), dtype=np.float32)
    images *= SYNTHETIC_NOISE
    images += patterns[labels]
    np.clip(images, 0.0, 1.0, out=images)
    return images, labels
