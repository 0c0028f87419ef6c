"""The plan as a table for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hvdkit.common.units import bytes_text, duration_text
from hvdkit.measure.bench.tables import interval
from hvdkit.measure.plan.model import Policy, Row, Training

_MOST_COLUMNS = 10


def show(training: Training, rows: Sequence[Row], notes: Sequence[str], console: Console) -> None:
    """Print it for a reader."""
    for title, names, words in _tables(training, rows):
        table = Table(title=title, title_justify="left", title_style="bold")
        for name in names:
            table.add_column(name, justify="right", overflow="fold")
        for line in words:
            table.add_row(*line)
        console.print(table)
    if training.gradient_bytes is not None:
        console.print(f"Gradients: {bytes_text(training.gradient_bytes)} a step, from every rank.", soft_wrap=True)
    for note in notes:
        console.print(f"- {note}", soft_wrap=True)


def markdown(training: Training, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The same in Markdown."""
    blocks = []
    for title, names, words in _tables(training, rows):
        lines = [names, ["---:"] * len(names), *words]
        blocks.append("\n".join([f"**{title}**", "", *(f"| {' | '.join(line)} |" for line in lines)]))
    if training.gradient_bytes is not None:
        blocks.append(f"Gradients: {bytes_text(training.gradient_bytes)} a step, from every rank.")
    return "\n\n".join([*blocks, *(["\n".join(f"- {note}" for note in notes)] if notes else [])])


def _tables(training: Training, rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    epochs = "1 epoch" if training.epochs == 1 else f"{training.epochs} epochs"
    timed = any(row.allreduce_s is not None for row in rows)
    names = ["ranks", "global batch", "steps per epoch", "steps", "learning rate", "warmup steps", "checkpoints"]
    title = f"{training.samples} samples, {epochs}, batches of {training.batch_size} per rank, {training.remainder!r}"
    plan = [_plan_row(row) + ([_predicted(row)] if timed else []) for row in rows]
    policies = [[str(row.ranks), *(_policy(policy) for policy in row.policies)] for row in rows]
    found = [
        (title, names + (["allreduce of the gradients"] if timed else []), plan),
        (
            "Steps per epoch by remainder policy",
            ["ranks", *(f"{policy.remainder}" for policy in rows[0].policies)],
            policies,
        ),
    ]
    if any(row.warmup_lr and row.ranks > 1 for row in rows):
        epochs_shown = _some(max(len(row.warmup_lr) for row in rows))
        rates = [
            [str(row.ranks), *(f"{row.warmup_lr[at]:.4g}" if at < len(row.warmup_lr) else "-" for at in epochs_shown)]
            for row in rows
        ]
        ends = [f"epoch {at + 1}" for at in epochs_shown]
        found.append(("Learning rate at the end of the warmup's epochs", ["ranks", *ends], rates))
    return found


def _some(epochs: int) -> list[int]:
    """Positions of the epochs that fit into a table: all, or the first and others as far apart, up to the last."""
    if epochs <= _MOST_COLUMNS:
        return list(range(epochs))
    return sorted({round(i * (epochs - 1) / (_MOST_COLUMNS - 1)) for i in range(_MOST_COLUMNS)})


def _plan_row(row: Row) -> list[str]:
    steps = ["-", "-"] if row.steps is None else [str(row.steps_per_epoch), str(row.steps)]
    return [
        str(row.ranks),
        str(row.global_batch),
        *steps,
        f"{row.lr:.4g}",
        str(row.warmup_steps),
        str(row.checkpoints),
    ]


def _predicted(row: Row) -> str:
    if row.allreduce_s is None:
        return "-"
    if row.allreduce_s.value == 0:
        return "0"
    text = duration_text(1e6 * row.allreduce_s.value)
    if row.allreduce_s.low is None:
        return text
    return f"{interval(row.allreduce_s.scaled(1000))} ms"


def _policy(policy: Policy) -> str:
    if policy.steps is None:
        return "none"
    extra = [f"{policy.dropped} left out"] * bool(policy.dropped) + [f"{policy.padded} filled"] * bool(policy.padded)
    return f"{policy.steps} ({', '.join(extra)})" if extra else str(policy.steps)
