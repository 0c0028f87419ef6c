"""What ``hvdkit trace`` finds: plain values. Times are milliseconds here, and seconds in JSON."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.common.json_files import Document
from hvdkit.read.causes import Cause


@dataclass(frozen=True)
class Operator:
    """All calls of one name.

    Attributes:
        name: of the operator, range, kernel or copy.
        kind: "operator", "range", "data", "communication", "kernel" or "copy".
        calls: how many.
        self_ms: in the calls themselves, without the calls inside them. For kernels and for communication in the
            background: all of it.
    """

    name: str
    kind: str
    calls: int
    self_ms: float


@dataclass(frozen=True)
class TraceTimes:
    """Where the time went; every figure is the length of a union of intervals.

    Attributes:
        window: from the beginning of the first step to the end of the last, or of all events where there are no steps.
        computation: something was computed.
        communication: at least one collective ran, or was waited for.
        overlapped: both at once.
        exposed: communication without computation.
        data: the data loader was asked for a batch and had not given it yet.
        exposed_data: and nothing was computed or communicated meanwhile.
        copies: the GPU copied or set memory.
        other: none of these: Python, the optimizer's own code, waiting.
    """

    window: float
    computation: float
    communication: float
    overlapped: float
    exposed: float
    data: float
    exposed_data: float
    copies: float
    other: float


@dataclass(frozen=True)
class IdleGpu:
    """When a GPU neither computes nor communicates, by what the host does or the GPU copies meanwhile.

    Attributes:
        idle: all of it; the other times add up to it.
        loading: the data loader is asked for a batch.
        copying: data is copied between host and GPU.
        synchronising: the host is in a call that waits for the GPU.
        launching: the host does something else, such as launching kernels too slowly.
        call: in which the host synchronises longest; "" where it does not.
    """

    idle: float
    loading: float
    copying: float
    synchronising: float
    launching: float
    call: str


@dataclass(frozen=True)
class TraceStep:
    """One step.

    Attributes:
        number: its own.
        duration: from its beginning to its end.
        computation, exposed, data: what was in it, as in ``TraceTimes``.
    """

    number: int
    duration: float
    computation: float
    exposed: float
    data: float


@dataclass(frozen=True)
class RankTrace:
    """The trace of one process.

    Attributes:
        path: the file.
        rank, size: None where neither the file nor its name says so.
        times: of the window.
        computed_by: what counts as computation, in words.
        steps: in order of time.
        operators: by the time in themselves, the largest first.
        events, skipped: of the file; see ``TraceColumns``.
        notes: what a reader must know about the figures.
        gpu: when it did nothing; None where no GPU was recorded.
        waiting: in collectives for the last rank, in a step, the mean; None where ranks cannot be compared.
        cost: for which it kept the others waiting, in a step, the mean (``lateness.costs``); None likewise.
    """

    path: str
    rank: int | None
    size: int | None
    times: TraceTimes
    computed_by: str
    steps: tuple[TraceStep, ...]
    operators: tuple[Operator, ...]
    events: int
    skipped: int
    notes: tuple[str, ...]
    gpu: IdleGpu | None = None
    waiting: float | None = None
    cost: float | None = None


_TIMES = (
    "self_ms window computation communication overlapped exposed data exposed_data copies other duration waiting "
    "cost idle loading copying synchronising launching"
)
TIMES = frozenset(_TIMES.split())


class TraceSummary(Document, frozen=True):
    """What the steps of a training were spent on; seconds and bytes.

    Attributes:
        ranks: by number, those without one last.
        skew_note: why ranks cannot be compared; "" where they are.
        causes: what costs time, the one that costs the largest share first.
    """

    kind = "trace-summary"
    schema = 5
    written_by = "hvdkit trace summary --json"
    times = TIMES
    unit_s = 1e-3

    ranks: tuple[RankTrace, ...]
    skew_note: str
    causes: tuple[Cause, ...] = ()
