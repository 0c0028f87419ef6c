"""The exchanges between ranks of a recording: a fused batch counts once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdkit.read.timeline import measures
from hvdkit.read.timeline.columns import TimelineColumns
from hvdkit.read.timeline.measures import Floats

SMALL = 1 << 16
"""Bytes up to which an exchange takes its latency, not its bytes."""


@dataclass(frozen=True)
class Exchanges:
    """Exchanges, those through the fusion buffer first; times in microseconds.

    Attributes:
        bytes: of all tensors of each; NaN where the file does not say it.
        begin, end: of each.
        tensors: how many tensors went through the fusion buffer together, of each fused exchange.
    """

    bytes: Floats
    begin: Floats
    end: Floats
    tensors: NDArray[np.intp]

    @property
    def fused(self) -> int:
        """How many went through the fusion buffer."""
        return len(self.tensors)

    @property
    def times(self) -> Floats:
        """How long each took."""
        return self.end - self.begin

    @property
    def little(self) -> NDArray[np.bool_]:
        """Whether each is of at most 64 KB."""
        return np.asarray(self.bytes <= SMALL, np.bool_)


def exchanges(columns: TimelineColumns, rows: NDArray[np.bool_]) -> Exchanges:
    """The exchanges of some operations.

    Args:
        columns: the recording.
        rows: which operations count; those without a collective do not.
    """
    rows = rows & ~np.isnan(columns.exchange[:, 0])
    fused, single = np.flatnonzero(rows & columns.fused), np.flatnonzero(rows & ~columns.fused)
    fused = fused[np.argsort(columns.start[fused], kind="stable")]
    numbers = measures.batch_numbers(columns.start[fused], columns.exchange[fused])
    edges = np.flatnonzero(np.diff(numbers, prepend=-1))
    if not len(fused):
        edges = np.zeros(0, np.intp)
        sizes = begin = end = np.zeros(0)
    else:
        sizes = np.add.reduceat(columns.bytes[fused], edges)
        begin = np.minimum.reduceat(columns.exchange[fused, 0], edges)
        end = np.maximum.reduceat(columns.exchange[fused, 1], edges)
    return Exchanges(
        np.concatenate((sizes, columns.bytes[single])),
        np.concatenate((begin, columns.exchange[single, 0])),
        np.concatenate((end, columns.exchange[single, 1])),
        np.bincount(numbers) if len(numbers) else np.zeros(0, np.intp),
    )
