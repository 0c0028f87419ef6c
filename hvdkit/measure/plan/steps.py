"""``hvdkit plan steps``: the numbers of a training at each number of ranks, by the eight steps' own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvdkit.common import plot
from hvdkit.common.commands import AT_LEAST_1, PATH, large_count, number, numbers_of_ranks, output_file
from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table
from hvdkit.common.units import count_text, ranks_text, share_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.learning_rate import RULES, scale_factor, scale_lr, warmup_multiplier, warmup_steps
from hvdkit.steps.shards import REMAINDERS, steps_per_epoch
from hvdkit.steps.topology import Topology

LARGEST_LINEAR_BATCH = 8192
"""Up to this global batch Goyal et al. (2017, figure 1) found the linear rule without loss; on ImageNet."""
MOST = 10**15
"""Ranks, samples, and so on: more are typing errors, and are no numbers to compute with."""
_MUCH_LOST = 0.05
_LONG_WARMUP = 0.25
_MOST_COLUMNS = 10


@dataclass(frozen=True, slots=True)
class PlannedTraining:
    """What is asked about.

    Attributes:
        samples: in the whole data set.
        batch_size: samples per step on one rank.
        base_lr: learning rate tuned for one process.
        epochs: passes over the data.
        rule: how the rate is scaled: "linear", "sqrt" or "none".
        warmup_epochs: length of the warmup.
        remainder: the policy that the training uses: "drop", "pad" or "exact".
        checkpoint_epochs: epochs between checkpoints.
    """

    samples: int
    batch_size: int
    base_lr: float
    epochs: int
    rule: str = "linear"
    warmup_epochs: float = 5.0
    remainder: str = "drop"
    checkpoint_epochs: int = 1


@dataclass(frozen=True, slots=True)
class Policy:
    """What one remainder policy does in an epoch.

    Attributes:
        remainder: its name.
        steps: in an epoch; None where no step is left.
        dropped: samples that the epoch leaves out.
        padded: places that samples fill once more.
    """

    remainder: str
    steps: int | None
    dropped: int = 0
    padded: int = 0


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One number of ranks.

    Attributes:
        ranks: the number.
        global_batch: samples per step on all ranks together.
        policies: in the order of ``REMAINDERS``.
        steps_per_epoch, steps: of the policy in use; None where no step is left.
        lr: after the warmup.
        warmup_steps: its length; 0 where the rate is not raised.
        warmup_lr: the rate at the end of each epoch of the warmup.
        checkpoints: written in all.
    """

    ranks: int
    global_batch: int
    policies: tuple[Policy, ...]
    steps_per_epoch: int | None
    steps: int | None
    lr: float
    warmup_steps: int
    warmup_lr: tuple[float, ...]
    checkpoints: int


class PlannedSteps(Document, frozen=True):
    """The numbers of a training.

    Attributes:
        training: what was asked about.
        rows: by number of ranks.
        notes: what a reader should know, full sentences.
    """

    kind = "plan-steps"
    written_by = "hvdkit plan steps --json"

    training: PlannedTraining
    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...]


def row(training: PlannedTraining, ranks: int) -> PlanRow:
    """The numbers of a training on ``ranks`` ranks.

    Raises:
        InvalidArgumentError: a number of the training that cannot be right.
    """
    if ranks > MOST:
        raise InvalidArgumentError(f"-n has a number above {MOST:g}; expected numbers of ranks that can be.")
    world = Topology(0, ranks, 0, ranks, 0, 1, "plan")  # the root's view, on one host
    lr = scale_lr(training.base_lr, world, training.rule)
    if not math.isfinite(lr):
        raise InvalidArgumentError(
            f"--lr {training.base_lr:g} scaled to {ranks} ranks is no number any more; give a smaller rate."
        )
    global_batch = training.batch_size * ranks
    policies = []
    for remainder in REMAINDERS:
        if remainder == "drop" and training.samples < global_batch:
            policies.append(Policy(remainder, None, training.samples))
            continue
        count = steps_per_epoch(training.samples, training.batch_size, world, remainder)
        beyond = count * global_batch - training.samples
        policies.append(Policy(remainder, count, max(0, -beyond), max(0, beyond) if remainder == "pad" else 0))
    steps = next(policy.steps for policy in policies if policy.remainder == training.remainder)
    raised = scale_factor(ranks, training.rule) > 1
    warmup = warmup_steps(training.warmup_epochs, steps) if steps and raised else 0
    raised_epochs = min(training.epochs, math.ceil(training.warmup_epochs)) if warmup else 0
    return PlanRow(
        ranks=ranks,
        global_batch=global_batch,
        policies=tuple(policies),
        steps_per_epoch=steps,
        steps=steps * training.epochs if steps else None,
        lr=lr,
        warmup_steps=warmup,
        warmup_lr=tuple(_rate(training, ranks, epoch * (steps or 0), warmup) for epoch in range(1, raised_epochs + 1)),
        checkpoints=-(-training.epochs // training.checkpoint_epochs) if steps else 0,
    )


def _rate(training: PlannedTraining, ranks: int, step: int, warmup: int) -> float:
    factor = scale_factor(ranks, training.rule)
    return training.base_lr * factor * warmup_multiplier(step, warmup, factor)


def notes(training: PlannedTraining, planned: PlanRow) -> list[str]:
    """Full sentences: what a reader should know of one number of ranks."""
    ranks = ranks_text(planned.ranks)
    used = next(policy for policy in planned.policies if policy.remainder == training.remainder)
    found = []
    if planned.steps_per_epoch is None:
        found.append(
            f"On {ranks}: {training.samples} samples are fewer than one global batch of {planned.global_batch}, so "
            "that 'drop' leaves no step; use a smaller --batch-size or --remainder exact."
        )
    elif used.dropped > _MUCH_LOST * training.samples:
        share = share_text(used.dropped / training.samples)
        found.append(
            f"On {ranks}: 'drop' leaves out {count_text(used.dropped, 'sample')} of every epoch ({share}, others each "
            "time, since the order is drawn anew); --remainder exact uses them all."
        )
    if scale_factor(planned.ranks, training.rule) <= 1:
        return found
    if planned.steps is not None and planned.warmup_steps >= planned.steps:
        found.append(f"On {ranks}: the training ends within its warmup, before the learning rate is {planned.lr:.4g}.")
    elif planned.steps is not None and planned.warmup_steps > _LONG_WARMUP * planned.steps:
        found.append(f"On {ranks}: {share_text(planned.warmup_steps / planned.steps)} of all steps are warmup.")
    if training.rule == "linear" and planned.global_batch > LARGEST_LINEAR_BATCH:
        found.append(
            f"On {ranks}: the global batch of {planned.global_batch} is above {LARGEST_LINEAR_BATCH}, up to which the "
            "linear rule was found to lose no accuracy (Goyal et al. 2017, on ImageNet); try --rule sqrt, an optimizer "
            "made for large batches, or a smaller --batch-size."
        )
    return found


def _tables(training: PlannedTraining, rows: Sequence[PlanRow]) -> list[Table]:
    """Steps and rates, the three policies, and the warmup where there is one."""
    names = ("ranks", "global batch", "steps per epoch", "steps", "learning rate", "warmup steps", "checkpoints")
    epochs = count_text(training.epochs, "epoch")
    title = f"{training.samples} samples, {epochs}, batches of {training.batch_size} per rank, {training.remainder!r}"
    cells = [
        [one.ranks, one.global_batch, one.steps_per_epoch, one.steps, f"{one.lr:.4g}", one.warmup_steps,
         one.checkpoints]
        for one in rows
    ]  # fmt: skip
    policies = [[one.ranks, *map(_policy_text, one.policies)] for one in rows]
    found = [Table(title, names, cells), Table("Steps per epoch by remainder policy", ("ranks", *REMAINDERS), policies)]
    if any(one.warmup_lr and one.ranks > 1 for one in rows):
        last = max(len(one.warmup_lr) for one in rows) - 1
        count = min(last + 1, _MOST_COLUMNS)  # all epochs, or the first and others as far apart, up to the last
        shown = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
        rates = [
            [one.ranks, *(f"{one.warmup_lr[at]:.4g}" if at < len(one.warmup_lr) else None for at in shown)]
            for one in rows
        ]
        columns = ("ranks", *(f"epoch {at + 1}" for at in shown))
        found.append(Table("Learning rate at the end of the warmup's epochs", columns, rates))
    return found


def _policy_text(policy: Policy) -> str:
    if policy.steps is None:
        return "none"
    extra = [f"{policy.dropped} left out"] * bool(policy.dropped) + [f"{policy.padded} filled"] * bool(policy.padded)
    return f"{policy.steps} ({', '.join(extra)})" if extra else str(policy.steps)


def _draw(axes: Any, training: PlannedTraining, rows: Sequence[PlanRow]) -> None:
    """The learning rate over the epochs, so that numbers of ranks can be compared."""
    for planned in rows:
        if planned.steps is None or planned.steps_per_epoch is None:
            continue
        last = planned.steps - 1
        steps = sorted({0, min(planned.warmup_steps, last), last})  # between them the rate is a straight line
        rates = [_rate(training, planned.ranks, step, planned.warmup_steps) for step in steps]
        axes.plot([step / planned.steps_per_epoch for step in steps], rates, label=str(planned.ranks))
    axes.set(xlabel="epoch", ylabel="learning rate")
    axes.set_ylim(bottom=0)
    axes.legend(title="ranks")


_WHOLE = click.IntRange(min=1, max=MOST)
_MOST_EPOCHS = 10**6


@click.command()
@click.option("--samples", callback=large_count, required=True, metavar="S", help="Samples in the training set.")
@click.option("--batch-size", type=_WHOLE, required=True, metavar="B", help="Samples per step on each rank.")
@click.option("--lr", "base_lr", type=float, callback=number(0, above=True), required=True, metavar="L",
              help="Learning rate for one process.")  # fmt: skip
@click.option("--epochs", type=click.IntRange(1, _MOST_EPOCHS), default=1, metavar="E")
@click.option("-n", "ranks", required=True, callback=numbers_of_ranks, metavar="N,...",
              help="Numbers of ranks, such as 1,2,4,8.")  # fmt: skip
@click.option("--rule", type=click.Choice(RULES), default="linear",
              help="How the learning rate scales with the number of ranks.")  # fmt: skip
@click.option("--warmup-epochs", type=float, callback=number(0, most=_MOST_EPOCHS), default=5.0, metavar="W",
              help="Epochs of warmup; 0 for none.")  # fmt: skip
@click.option("--remainder", type=click.Choice(REMAINDERS), default="drop",
              help="What happens to the last partial batch of an epoch. All three are shown; steps are counted for "
              "this one.")  # fmt: skip
@click.option("--checkpoint-epochs", type=AT_LEAST_1, default=1, metavar="K",
              help="Save a checkpoint every K epochs and after the last one.")  # fmt: skip
@click.option("--plot", "figure", type=PATH, callback=output_file, metavar="FILE",
              help="Draw the learning rate (.svg, .png, .pdf).")  # fmt: skip
@click.option("--json", "form", flag_value="json", help="Print JSON.")
def steps(*, ranks: tuple[int, ...], figure: Path | None, form: str | None, **asked: Any) -> int:
    """Show what a training will do on each number of ranks.

    The training will get the same numbers from hvdkit's functions: steps per epoch, global batch, samples that a
    remainder policy leaves out or uses twice, the learning rate with its warmup, and checkpoints.

    \b
    Examples:
      hvdkit plan steps --samples 60000 --batch-size 64 --lr 0.01 --epochs 12 -n 1,2,4,8
      hvdkit plan steps --samples 60000 --batch-size 512 --lr 0.01 --epochs 50 -n 8 --warmup-epochs 3 --plot rates.svg
    """
    training = PlannedTraining(**asked)
    rows = [row(training, n) for n in ranks]
    said = [note for one in rows for note in notes(training, one)]
    if figure is not None:
        if all(planned.steps is None for planned in rows):
            raise InvalidArgumentError("at no number of ranks is a step left, so there is no learning rate to plot.")
        plot.write(figure, lambda axes: _draw(axes, training, rows), size=(7, 4))
    Page(_tables(training, rows), said).print(form, PlannedSteps(training, tuple(rows), tuple(said)))
    return 0
