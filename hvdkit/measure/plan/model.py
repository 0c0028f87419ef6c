"""The numbers of a training at each number of ranks; pure functions over the eight steps' own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdkit.common.intervals import Estimate
from hvdkit.common.json_files import Document
from hvdkit.common.units import count_text, ranks_text, share_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.epochs import REMAINDERS, steps_per_epoch
from hvdkit.steps.learning_rate import scale_factor, scale_lr, warmup_multiplier, warmup_steps
from hvdkit.steps.topology import Topology

LARGEST_LINEAR_BATCH = 8192
"""Up to this global batch Goyal et al. (2017, figure 1) found the linear rule without loss; on ImageNet."""
MOST = 10**15
"""Ranks, samples, and so on: more are typing errors, and are no numbers to compute with."""
_MUCH_LOST = 0.05
_LONG_WARMUP = 0.25


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
        gradient_bytes: of all gradients of a step; None when it is not known.
    """

    samples: int
    batch_size: int
    base_lr: float
    epochs: int
    rule: str = "linear"
    warmup_epochs: float = 5.0
    remainder: str = "drop"
    checkpoint_epochs: int = 1
    gradient_bytes: int | None = None


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
        samples_over_size: what ``samples / size`` of the tutorials gives for the steps of an epoch.
        allreduce_s: predicted, for all gradients in one piece; None without measurements.
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
    samples_over_size: int
    allreduce_s: Estimate | None = None


class Planned(Document, frozen=True):
    """The numbers of a training.

    Attributes:
        training: what was asked about.
        rows: by number of ranks.
        notes: what a reader should know, full sentences.
    """

    kind = "plan"
    written_by = "hvdkit plan --json"

    training: PlannedTraining
    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...]


def row(training: PlannedTraining, ranks: int, allreduce_s: Estimate | None = None) -> PlanRow:
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
    policies = tuple(_policy(training, world, remainder) for remainder in REMAINDERS)
    steps = next(policy.steps for policy in policies if policy.remainder == training.remainder)
    raised = scale_factor(ranks, training.rule) > 1
    warmup = warmup_steps(training.warmup_epochs, steps) if steps and raised else 0
    raised_epochs = min(training.epochs, math.ceil(training.warmup_epochs)) if warmup else 0
    return PlanRow(
        ranks=ranks,
        global_batch=training.batch_size * ranks,
        policies=policies,
        steps_per_epoch=steps,
        steps=steps * training.epochs if steps else None,
        lr=lr,
        warmup_steps=warmup,
        warmup_lr=tuple(_rate(training, ranks, epoch * (steps or 0), warmup) for epoch in range(1, raised_epochs + 1)),
        checkpoints=-(-training.epochs // training.checkpoint_epochs) if steps else 0,
        samples_over_size=training.samples // ranks,
        allreduce_s=allreduce_s,
    )


def curve(training: PlannedTraining, planned: PlanRow, steps: Iterable[int] | None = None) -> list[float]:
    """The learning rate of each of some steps of the training, or of all; it rises in the warmup and then stays.

    Args:
        steps: numbers of steps, from 0 on.
    Raises:
        InvalidArgumentError: no step is left at this number of ranks.
    """
    if planned.steps is None:
        raise InvalidArgumentError(f"on {planned.ranks} ranks no step is left; there is no learning rate to show.")
    wanted = range(planned.steps) if steps is None else steps
    return [_rate(training, planned.ranks, step, planned.warmup_steps) for step in wanted]


def notes(training: PlannedTraining, rows: Sequence[PlanRow]) -> list[str]:
    """Full sentences: what a reader should know."""
    found = [note for planned in rows for note in (*_of_steps(training, planned), *_of_rate(training, planned))]
    return [*found, *_of_samples_over_size(rows)]


def _of_samples_over_size(rows: Sequence[PlanRow]) -> list[str]:
    wrong = [row for row in rows if row.steps_per_epoch and row.samples_over_size > row.steps_per_epoch]
    if not wrong:
        return []
    times = [
        f"{_times(row.samples_over_size / (row.steps_per_epoch or 1))} on {ranks_text(row.ranks)}" for row in wrong
    ]
    return [
        "samples / size, as tutorials write the steps of an epoch, forgets the batch size and would train "
        f"{', '.join(times)} too long."
    ]


def _policy(training: PlannedTraining, world: Topology, remainder: str) -> Policy:
    global_batch = training.batch_size * world.size
    if remainder == "drop" and training.samples < global_batch:
        return Policy(remainder, None, training.samples)
    steps = steps_per_epoch(training.samples, training.batch_size, world, remainder)
    ragged = steps * global_batch - training.samples
    return Policy(remainder, steps, max(0, -ragged), max(0, ragged) if remainder == "pad" else 0)


def _rate(training: PlannedTraining, ranks: int, step: int, warmup: int) -> float:
    factor = scale_factor(ranks, training.rule)
    return training.base_lr * factor * warmup_multiplier(step, warmup, factor)


def _of_steps(training: PlannedTraining, planned: PlanRow) -> list[str]:
    ranks = ranks_text(planned.ranks)
    if planned.steps_per_epoch is None:
        return [
            f"On {ranks}: {training.samples} samples are fewer than one global batch of {planned.global_batch}, so "
            "that 'drop' leaves no step; use a smaller --batch-size or --remainder exact."
        ]
    found = []
    used = next(policy for policy in planned.policies if policy.remainder == training.remainder)
    if used.dropped > _MUCH_LOST * training.samples:
        share = share_text(used.dropped / training.samples)
        found.append(
            f"On {ranks}: 'drop' leaves out {count_text(used.dropped, 'sample')} of every epoch ({share}, others each "
            "time, since the order is drawn anew); --remainder exact uses them all."
        )
    return found


def _of_rate(training: PlannedTraining, planned: PlanRow) -> list[str]:
    ranks = ranks_text(planned.ranks)
    found = []
    raised = scale_factor(planned.ranks, training.rule) > 1
    if raised and planned.steps is not None and planned.warmup_steps >= planned.steps:
        found.append(f"On {ranks}: the training ends within its warmup, before the learning rate is {planned.lr:.4g}.")
    elif raised and planned.steps is not None and planned.warmup_steps > _LONG_WARMUP * planned.steps:
        share = share_text(planned.warmup_steps / planned.steps)
        found.append(f"On {ranks}: {share} of all steps are warmup.")
    if raised and training.rule == "linear" and planned.global_batch > LARGEST_LINEAR_BATCH:
        found.append(
            f"On {ranks}: the global batch of {planned.global_batch} is above {LARGEST_LINEAR_BATCH}, up to which the "
            "linear rule was found to lose no accuracy (Goyal et al. 2017, on ImageNet); try --rule sqrt, an optimizer "
            "made for large batches, or a smaller --batch-size."
        )
    return found


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio < 1000 else f"{ratio:.0f} times"
