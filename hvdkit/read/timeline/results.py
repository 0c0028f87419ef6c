"""What a summary holds: plain numbers. Times are microseconds here, and seconds in JSON."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdkit.common.json_files import Document
from hvdkit.observe.lateness import Floats
from hvdkit.read.causes import Cause
from hvdkit.read.timeline.measures import Distribution


@dataclass(frozen=True)
class TensorSummary:
    """All operations of one tensor under one kind of collective.

    Attributes:
        tensor, kind, dtype, shape: what it is, as far as the file says.
        count: how many operations.
        bytes: of one operation, the largest; None where the file does not say.
        phases: group of phases (model.GROUPS) to its distribution, "whole" from announcement to end.
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
