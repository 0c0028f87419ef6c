"""The learning rate over the training, a curve for each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdkit.common import plot
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.plan.model import PlannedTraining, PlanRow, curve


def write(path: Path, training: PlannedTraining, rows: Sequence[PlanRow]) -> None:
    """Draw the learning rate over the epochs; x in epochs, so that numbers of ranks can be compared.

    Raises:
        InvalidArgumentError: a file name that ends in another format, or no number of ranks has a step.
        MissingFrameworkError: Matplotlib is not installed.
        DataError: the file cannot be written.
    """
    drawn = [row for row in rows if row.steps is not None]
    if not drawn:
        raise InvalidArgumentError("at no number of ranks is a step left, so there is no learning rate to plot.")
    plot.write(path, lambda axes: _rates(axes, training, drawn), size=(7, 4))


def _rates(axes: Any, training: PlannedTraining, rows: Sequence[PlanRow]) -> None:
    for row in rows:
        last = (row.steps or 1) - 1
        steps = sorted({0, min(row.warmup_steps, last), last})  # between them the rate is a straight line
        epochs = [step / (row.steps_per_epoch or 1) for step in steps]
        axes.plot(epochs, curve(training, row, steps), label=str(row.ranks))
    axes.set(xlabel="epoch", ylabel="learning rate")
    axes.set_ylim(bottom=0)
    axes.legend(title="ranks")
