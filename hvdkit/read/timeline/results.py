"""What a summary holds, and what of it costs a job time. Times are microseconds here, and seconds in JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.allreduce import CACHE_CAPACITY, CYCLE_S
from hvdkit.common.json_files import Document
from hvdkit.common.units import bytes_text, duration_text, share_text, shortened
from hvdkit.errors import name_ranks
from hvdkit.observe.lateness import Floats, to_blame
from hvdkit.read.causes import HOW_MUCH_IS_HIDDEN, SENTENCES, WHY_LATE, WORTH_SAYING, Cause, many_small
from hvdkit.read.timeline.columns import OUTER

_MOST_HIDDEN = 0.1
"""Share of a step below which collectives and cycles are not worth a cause: the backward pass hides most of them."""
MANY = 3
"""Small exchanges in a step from which on it is many."""


@dataclass(frozen=True)
class Distribution:
    """Of a set of values, in their unit; percentiles are exact, by linear interpolation.

    Attributes:
        count: how many.
        total: their sum.
        p50, p95, p99: so many in a hundred are at most as large.
        max: the largest.
    """

    count: int
    total: float
    p50: float
    p95: float
    p99: float
    max: float

    @property
    def mean(self) -> float:
        """Of the values."""
        return self.total / self.count


def distribution(values: NDArray[Any]) -> Distribution | None:
    """The distribution of the values that are numbers; None when there is none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Distribution(len(values), float(values.sum(dtype=np.float64)), p50, p95, p99, float(values.max()))


@dataclass(frozen=True)
class TensorSummary:
    """All operations of one tensor under one kind of collective.

    Attributes:
        tensor, kind, dtype, shape: what it is, as far as the file says.
        count: how many operations.
        bytes: of one operation, the largest; None where the file does not say.
        phases: group of phases (reader.GROUPS) to its distribution, "whole" from announcement to end.
        role: "packed gradients", "outer step", "shard_state", "sync_batch_norm", or "" for any other.
    """

    tensor: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    count: int
    bytes: int | None
    phases: dict[str, Distribution]
    role: str = ""


@dataclass(frozen=True)
class Steps:
    """Training steps, from the start of one to the start of the next.

    Attributes:
        count: how many.
        tensors: how many tensors one step reduces.
        bytes: that most steps reduce; None where sizes are unknown.
        duration: of all steps but the first and the last, whose end is not known.
        communication: in collectives, per step, of the same steps.
        idle: without any operation between announcement and end, per step, of the same steps.
        first: duration of the first step.
        missed: share of operations that were not in the response cache, from the third step on; None before that.
        late: that a step waits, on average, because ranks announce a tensor more than two cycles apart.
        negotiation: that it waits besides until all ranks have announced a tensor.
        begins: when each step started.
    """

    count: int
    tensors: int
    bytes: int | None
    duration: Distribution | None
    communication: Distribution | None
    idle: Distribution | None
    first: float | None
    missed: float | None
    late: float | None
    negotiation: float | None
    begins: Floats

    @property
    def durations(self) -> Floats:
        """Of every step but the last."""
        return np.diff(self.begins)


@dataclass(frozen=True)
class Batches:
    """Exchanges of reductions: fused ones carry several tensors, the others one.

    Attributes:
        fused: number of exchanges through the fusion buffer.
        single: number of exchanges of one tensor without it.
        little, little_time: exchanges of at most 64 KB, fused or not, and the time that so many usual ones take.
        large_share: of the time of all exchanges, the part in those of more than 64 KB, or of unknown size, 0 to 1.
        tensors, bytes: of the fused ones.
    """

    fused: int
    single: int
    little: int
    little_time: float
    large_share: float
    tensors: Distribution | None
    bytes: Distribution | None


_TIMES = (
    "origin duration communication setup idle first negotiation late costs little_time cycle phases "
    "start_time_since_epoch"
)


class TimelineSummary(Document, frozen=True):
    """Where the time of a recording went; seconds, bytes, and bytes per second.

    Attributes:
        path: the file.
        start_time_since_epoch: when the recording began, since 1970; None where the file does not say.
        origin: when its first operation or cycle began, on the clock of the file.
        duration: from there to the end of the last operation.
        events: how many the file holds.
        operations, missed: in it, and those of them that were not in the response cache.
        ranks: of the job, by the highest that it names; None when it names none.
        communication: time in which at least one collective ran.
        setup: time in which NCCL was set up.
        steps, batches: of the training and its exchanges; None where there are none.
        tensors: by total time, the largest first.
        cycle: between two marks of cycles; None where they are not marked.
        costs: rank to the time of a step for which it keeps the others waiting, on average (``lateness.costs``); None
            where too few operations say which rank was late.
        dropped: reason to number of events that could not be used.
        causes: what costs time in it, the one that costs the largest share first.
    """

    kind = "timeline-summary"
    schema = 6
    written_by = "hvdkit timeline summary --json"
    times = frozenset(_TIMES.split())
    unit_s = 1e-6

    path: str
    start_time_since_epoch: int | None
    origin: float
    duration: float
    events: int
    operations: int
    missed: int
    ranks: int | None
    communication: float
    setup: float
    steps: Steps | None
    tensors: list[TensorSummary]
    batches: Batches | None
    cycle: Distribution | None
    costs: dict[int, float] | None
    dropped: dict[str, int]
    causes: tuple[Cause, ...] = ()


def causes(summary: TimelineSummary) -> list[Cause]:
    """What costs time in a recording, in no order; ``read.causes.by_cost`` weighs it."""
    found = [_setup(summary)]
    steps = summary.steps
    if steps is not None and steps.duration is not None and steps.duration.p50 > 0:
        duration = steps.duration
        found += [rule(summary, steps, duration) for rule in (_late, _negotiation, _small, _large)]
    return [cause for cause in found if cause is not None]


def otherwise(summary: TimelineSummary) -> str:
    """The verdict where no cause is worth a sentence."""
    steps = summary.steps
    if steps is not None and (steps.duration is None or steps.idle is None or steps.duration.p50 <= 0):
        return "It cannot tell: fewer than three steps are in the recording."
    if steps is None and any(tensor.role == OUTER for tensor in summary.tensors):
        return "It cannot tell: weights are averaged in outer steps, and no gradient is reduced between them."
    if steps is None or steps.duration is None or steps.idle is None:
        return (
            "It cannot tell: there are no whole steps in the recording, no tensor is reduced three times. Record more "
            "steps, and give each tensor the same name in all of them (name= of Horovod's calls)."
        )
    idle, step = steps.idle.p50, steps.duration.p50
    return (
        f"No cause was found: late ranks and many small tensors count from {share_text(WORTH_SAYING)} of a step, other "
        f"collectives and negotiation from {share_text(_MOST_HIDDEN)}. For {duration_text(idle)} of a step of "
        f"{duration_text(step)} ({share_text(idle / step)}) no tensor was announced or reduced: input and computation."
    )


def _per_step(
    kind: str, lost: float, duration: Distribution, evidence: str, what: str, advice: str, ranks: tuple[int, ...] = ()
) -> Cause:
    hidden = kind in ("large-tensors", "small-tensors", "negotiation")
    return Cause(kind, lost / 1e6, lost / duration.mean, what, evidence, advice, ranks=ranks, at_most=hidden)


def _setup(summary: TimelineSummary) -> Cause | None:
    if not summary.setup:
        return None
    evidence = f"INIT_NCCL, {duration_text(summary.setup)} of {duration_text(summary.duration)} of the timeline"
    share = summary.setup / (summary.duration or 1.0)
    what, advice = SENTENCES["setup"]
    return Cause("setup", summary.setup / 1e6, share, what, evidence, advice, per_step=False)


def _late(summary: TimelineSummary, steps: Steps, duration: Distribution) -> Cause | None:
    """The ranks that the others wait for, by the ticks of the timeline; some rank, where it has no ticks."""
    costs = summary.costs
    if costs is None:
        if not steps.late:
            return None
        evidence = f"{duration_text(steps.late)} of negotiation in the mean step beyond one cycle"
        return _per_step("late", steps.late, duration, evidence, *SENTENCES["late"])
    ranks = to_blame(costs)
    lost = sum(costs[rank] for rank in ranks or costs)
    most = sorted(costs, key=lambda rank: -costs[rank])[:4]
    each = ", ".join(f"{rank} costs {duration_text(costs[rank])}" for rank in most)
    evidence = f"ticks of the timeline, by rank: {each} of each step"
    if not ranks:
        return _per_step("random-late", lost, duration, evidence, *SENTENCES["random-late"])
    what = f"{name_ranks(ranks).capitalize()} {'come' if len(ranks) > 1 else 'comes'} late, and the others wait."
    return _per_step("late", lost, duration, evidence, what, WHY_LATE, ranks)


def _negotiation(summary: TimelineSummary, steps: Steps, duration: Distribution) -> Cause | None:
    lost = steps.negotiation
    if not lost or lost < _MOST_HIDDEN * duration.mean:
        return None
    cycle, missed = summary.cycle.p50 if summary.cycle else 1e6 * CYCLE_S, steps.missed or 0.0
    known = "measured" if summary.cycle else "Horovod's default; set HOROVOD_TIMELINE_MARK_CYCLES=1 to measure it"
    evidence = f"{duration_text(lost)} from the first rank's announcement to the last one's; a cycle is "
    evidence += f"{duration_text(cycle)} ({known})"
    if outside_cache(missed, steps.tensors):
        what = f"{share_text(missed)} of the operations after the second step are negotiated anew, outside the cache."
        return _per_step("negotiation", lost, duration, evidence, what, SENTENCES["cache"][1])
    advice = (
        f"A shorter cycle: HOROVOD_CYCLE_TIME={max(0.1, cycle / 5000):.1g}, at the price of a busier thread; where "
        "tensors are small and many, reduce them as groups instead (num_groups)."
    )
    return _per_step("negotiation", lost, duration, evidence, SENTENCES["cycle"][0], advice)


def outside_cache(missed: float, tensors: int) -> bool:
    """Whether tensors are negotiated anew on account of the cache; of all of them where it was off, as --skew has it.

    Args:
        missed: share of the operations that were not in it.
        tensors: of a step.
    """
    return missed >= 0.2 and (missed < 0.99 or tensors > CACHE_CAPACITY)


def _small(summary: TimelineSummary, steps: Steps, duration: Distribution) -> Cause | None:
    batches = summary.batches
    if batches is None or batches.little < MANY * steps.count:
        return None
    evidence = f"{batches.little} exchanges of at most 64 KB"
    said = many_small(batches.little / steps.count)
    return _per_step("small-tensors", batches.little_time / steps.count, duration, evidence, *said)


def _large(summary: TimelineSummary, steps: Steps, duration: Distribution) -> Cause | None:
    batches = summary.batches
    if steps.communication is None or batches is None:
        return None
    lost = steps.communication.mean * batches.large_share
    if lost < _MOST_HIDDEN * duration.mean:
        return None
    size = "Large tensors" if steps.bytes is None else f"{bytes_text(steps.bytes)} per step"
    what = f"{size} {'are' if steps.bytes is None else 'is'} reduced."
    evidence = f"collectives of the timeline, {duration_text(lost)} of the mean step"
    sizes = [tensor for tensor in summary.tensors if tensor.bytes and tensor.kind in ("ALLREDUCE", "ADASUM")]
    if steps.bytes and steps.tensors > 1 and sizes:
        biggest = max(sizes, key=lambda tensor: tensor.bytes or 0)
        share = (biggest.bytes or 0) / steps.bytes
        evidence += (
            f"; {share_text(share)} of the bytes are {shortened(biggest.tensor, 40)}" if 0.5 <= share <= 1 else ""
        )
    advice = f"{SENTENCES['large-tensors'][1]} {HOW_MUCH_IS_HIDDEN}"
    return _per_step("large-tensors", lost, duration, evidence, what, advice)
