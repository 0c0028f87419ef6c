"""Efficiency over the number of ranks, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdkit.common import plot
from hvdkit.measure.predict.prediction import PredictionRow


def draw(path: Path, rows: Sequence[PredictionRow]) -> None:
    """Write the figure, as ``hvdkit.common.plot.write`` does; ``rows`` with an efficiency are in it."""
    plot.write(path, lambda axes: _efficiency(axes, rows), size=(6, 4))


def _efficiency(axes: Any, rows: Sequence[PredictionRow]) -> None:
    known = [(row.ranks, row.efficiency) for row in rows if row.efficiency is not None]
    ranks = [n for n, _ in known]
    axes.fill_between(
        ranks,
        [one.value if one.low is None else one.low for _, one in known],
        [one.value if one.high is None else one.high for _, one in known],
        alpha=0.25,
        label="interval",
    )
    axes.plot(ranks, [one.value for _, one in known], marker="o", label="predicted")
    axes.set(xscale="log", xlabel="ranks", ylabel="efficiency", ylim=(0, 1.05))
    axes.legend()
