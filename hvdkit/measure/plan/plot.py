"""The learning rate over the training, a curve for each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdkit.common.extras import of_extra
from hvdkit.common.files import replacing
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.plan.model import Row, Training, curve

with of_extra("report", "--plot draws with Matplotlib"):
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
_POINTS = 1000


def write(path: Path, training: Training, rows: Sequence[Row]) -> None:
    """Draw the learning rate over the epochs; x in epochs, so that numbers of ranks can be compared.

    Raises:
        InvalidArgumentError: a file name that does not end in one of ``FORMATS``, or no number of ranks has a step.
        DataError: the file cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise InvalidArgumentError(f"--plot expects a file name that ends in {', '.join(FORMATS)}, got {str(path)!r}.")
    drawn = [row for row in rows if row.steps is not None]
    if not drawn:
        raise InvalidArgumentError("at no number of ranks is a step left, so there is no learning rate to plot.")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for row in drawn:
        steps = _shown(row.steps or 1, row.warmup_steps)
        epochs = [step / (row.steps_per_epoch or 1) for step in steps]
        axes.plot(epochs, curve(training, row, steps), label=str(row.ranks))
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.legend(title="ranks")
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower())


def _shown(steps: int, warmup: int) -> list[int]:
    """About ``_POINTS`` of the steps, among them the end of the warmup and the last."""
    return sorted({*range(0, steps, max(1, steps // _POINTS)), min(warmup, steps - 1), steps - 1})
