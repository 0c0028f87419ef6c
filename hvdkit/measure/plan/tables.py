"""The plan as tables, and the learning rate as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdkit.common import plot
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, count_text, duration_text, interval_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.plan.model import PlannedTraining, PlanRow, Policy, curve

_MOST_COLUMNS = 10


def page(training: PlannedTraining, rows: Sequence[PlanRow], notes: Sequence[str]) -> Page:
    """What a training will do on each of several numbers of ranks."""
    found: list[Table | str] = [_steps(training, rows), _policies(rows)]
    if any(row.warmup_lr and row.ranks > 1 for row in rows):
        found.append(_rates(rows))
    if training.gradient_bytes is not None:
        found.append(f"Gradients: {bytes_text(training.gradient_bytes)} a step, from every rank.")
    return Page(found, notes)


def _steps(training: PlannedTraining, rows: Sequence[PlanRow]) -> Table:
    timed = any(row.allreduce_s is not None for row in rows)
    names = ["ranks", "global batch", "steps per epoch", "steps", "learning rate", "warmup steps", "checkpoints"]
    epochs = count_text(training.epochs, "epoch")
    title = f"{training.samples} samples, {epochs}, batches of {training.batch_size} per rank, {training.remainder!r}"
    lines = [_plan_row(row) + ([_predicted(row)] if timed else []) for row in rows]
    return Table(title, names + (["allreduce of the gradients"] if timed else []), lines)


def _policies(rows: Sequence[PlanRow]) -> Table:
    names = ["ranks", *(policy.remainder for policy in rows[0].policies)]
    lines = [[row.ranks, *map(_policy, row.policies)] for row in rows]
    return Table("Steps per epoch by remainder policy", names, lines)


def _rates(rows: Sequence[PlanRow]) -> Table:
    last = max(len(row.warmup_lr) for row in rows) - 1
    count = min(last + 1, _MOST_COLUMNS)  # all epochs, or the first and others as far apart, up to the last
    shown = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
    lines = [
        [row.ranks, *(f"{row.warmup_lr[at]:.4g}" if at < len(row.warmup_lr) else None for at in shown)] for row in rows
    ]
    names = ["ranks", *(f"epoch {at + 1}" for at in shown)]
    return Table("Learning rate at the end of the warmup's epochs", names, lines)


def _plan_row(row: PlanRow) -> list[object]:
    steps = [None, None] if row.steps is None else [row.steps_per_epoch, row.steps]
    return [row.ranks, row.global_batch, *steps, f"{row.lr:.4g}", row.warmup_steps, row.checkpoints]


def _predicted(row: PlanRow) -> str | None:
    if row.allreduce_s is None:
        return None
    if row.allreduce_s.value == 0:
        return "0"
    if row.allreduce_s.low is None:
        return duration_text(1e6 * row.allreduce_s.value)
    return f"{interval_text(row.allreduce_s.scaled(1000))} ms"


def _policy(policy: Policy) -> str:
    if policy.steps is None:
        return "none"
    extra = [f"{policy.dropped} left out"] * bool(policy.dropped) + [f"{policy.padded} filled"] * bool(policy.padded)
    return f"{policy.steps} ({', '.join(extra)})" if extra else str(policy.steps)


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
    plot.write(path, lambda axes: _draw(axes, training, drawn), size=(7, 4))


def _draw(axes: Any, training: PlannedTraining, rows: Sequence[PlanRow]) -> None:
    for row in rows:
        last = (row.steps or 1) - 1
        steps = sorted({0, min(row.warmup_steps, last), last})  # between them the rate is a straight line
        epochs = [step / (row.steps_per_epoch or 1) for step in steps]
        axes.plot(epochs, curve(training, row, steps), label=str(row.ranks))
    axes.set(xlabel="epoch", ylabel="learning rate")
    axes.set_ylim(bottom=0)
    axes.legend(title="ranks")
