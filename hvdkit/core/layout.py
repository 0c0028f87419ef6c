"""Which gradients travel together, and in which order."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np


def in_buckets(kinds: Sequence[Hashable], sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Gradients in buckets: each is closed as soon as it has so many bytes, and can leave before the others.

    Args:
        kinds: of each gradient, in the order in which they become ready; a bucket is of one kind.
        sizes: of each, in bytes.
        limit: bytes from which on a bucket is full, > 0.
    Returns:
        The positions in each bucket; full ones first, in the order in which they become full.
    """
    growing: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    full: list[list[int]] = []
    for position, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        growing.setdefault(kind, []).append(position)
        filled[kind] = filled.get(kind, 0) + size
        if filled[kind] >= limit:
            full.append(growing.pop(kind))
            del filled[kind]
    return [*full, *growing.values()]


def by_arrival(arrived: Mapping[Any, int], gradients: Sequence[Hashable]) -> list[int]:
    """For each gradient, in the order of the model, when it is expected: those that arrived, then last layers first."""
    last = len(arrived) + len(gradients)
    return [arrived.get(gradient, last - place) for place, gradient in enumerate(gradients)]


def sorted_alike(arrivals: Sequence[Any]) -> list[int]:
    """The order of all ranks' gradients, from the ``by_arrival`` of each rank: that of the first."""
    return [int(place) for place in np.argsort(np.asarray(arrivals[0]), kind="stable")]
