"""What ``hvdkit trace`` finds, and what of it costs a step time. Times are milliseconds here, and seconds in JSON."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdkit.common.json_files import Document
from hvdkit.common.units import duration_text, share_text
from hvdkit.errors import name_ranks
from hvdkit.observe.lateness import doing, lower_median, named, to_blame
from hvdkit.read.causes import ADVICE, SENTENCES, WORTH_SAYING, Cause

_MUCH = 0.1
"""Share of a step below which data loading and exchanges of all ranks are as they should be."""
_MS = 1e-3
_IDLE = {
    "copying": (
        "copying",
        "data is copied between host and GPU meanwhile",
        "Copy while the GPU computes: pin_memory=True in the DataLoader, .to(device, non_blocking=True), fewer .cpu() "
        "and .item().",
    ),
    "synchronising": (
        "synchronising",
        "the host is in calls that wait for the GPU ({call})",
        "Synchronise less often: keep losses and metrics on the GPU and read them once in many steps, and avoid "
        ".item(), nonzero() and conditions on tensors.",
    ),
    "launching": (
        "host-bound",
        "the host is slower than the GPU (host-bound)",
        "Give the GPU more at a time: a larger batch, torch.compile or CUDA graphs, fused optimizers, less Python and "
        "logging in the step.",
    ),
}
"""Why a GPU is idle, by the field of ``IdleGpu``: a word, what is said, what to do."""


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


def causes(summary: TraceSummary) -> list[Cause]:
    """What costs time in the traces of a run, in no order; ``read.causes.by_cost`` weighs it."""
    loading = min(_each(rank, "exposed_data") for rank in summary.ranks)
    seen = "exposed data loading, of the rank with the least"
    of_all = [_cause(summary, "input-everywhere", loading, seen, *SENTENCES["input-everywhere"])]
    of_all += [_exchange(summary), *_idle_gpu(summary)]
    late = [] if summary.skew_note else [_late(summary)]
    return [*late, *(cause for cause in of_all if cause.share >= _MUCH)]


def otherwise(summary: TraceSummary) -> str:
    """The verdict where no cause is worth a sentence."""
    share = sum(rank.times.computation for rank in summary.ranks) / sum(
        rank.times.window or 1 for rank in summary.ranks
    )
    return (
        f"No cause was found: late ranks count from {share_text(WORTH_SAYING)} of a step, loading on all ranks, "
        f"collectives and an idle GPU from {share_text(_MUCH)}. {share_text(share)} of the time is computation."
    )


def _idle_gpu(summary: TraceSummary) -> list[Cause]:
    """A GPU that has nothing to do while the host is busy or waits for it; of several the one with the least of it."""
    idle = [(rank, rank.gpu) for rank in summary.ranks if rank.gpu is not None]
    if not idle or len(idle) < len(summary.ranks):
        return []
    rank, gpu = min(idle, key=lambda pair: (pair[1].idle - pair[1].loading) / (pair[0].times.window or 1.0))
    lost = (gpu.idle - gpu.loading) / max(1, len(rank.steps))
    reason = max(_IDLE, key=lambda name: getattr(gpu, name))
    each = {"loading": "loading data", **{name: word for name, (word, _, _) in _IDLE.items()}}
    parts = ", ".join(
        f"{word} {duration_text(1e3 * getattr(gpu, name) / max(1, len(rank.steps)))}" for name, word in each.items()
    )
    several = len(summary.ranks) > 1  # then the least that all have: what a loader costs may be another rank's
    share = (gpu.idle - gpu.loading * several) / (rank.times.window or 1.0)
    who = "Every GPU is idle for at least" if several else "The GPU is idle for"
    _, why, advice = _IDLE[reason]
    what = f"{who} {share_text(share)} of the time: {why.format(call=gpu.call)}."
    evidence = f"kernels and calls of a step, idle while {parts}"
    return [_cause(summary, "idle-gpu", lost, evidence, what, advice)]


def _each(rank: RankTrace, name: str) -> float:
    """Milliseconds of a step in a part of ``TraceTimes``."""
    return float(getattr(rank.times, name)) / max(1, len(rank.steps))


def _cause(
    summary: TraceSummary, kind: str, lost: float, evidence: str, what: str, advice: str, ranks: tuple[int, ...] = ()
) -> Cause:
    step = max(_each(rank, "window") for rank in summary.ranks) or 1.0
    stepped = all(rank.steps for rank in summary.ranks)
    return Cause(kind, lost * _MS, lost / step, what, evidence, advice, per_step=stepped, ranks=ranks)


def _late(summary: TraceSummary) -> Cause:
    """The rank that the others wait for, and whether by data loading, computation or neither."""
    costs = {rank.rank or 0: rank.cost or 0.0 for rank in summary.ranks}
    ranks = to_blame(costs)
    lost = sum(costs[rank] for rank in ranks or costs)
    if not ranks:
        evidence = "time of the ranks in collectives that all of them recorded"
        return _cause(summary, "random-late", lost, evidence, *SENTENCES["random-late"])
    names = name_ranks(ranks)
    who, few = named(ranks, len(summary.ranks)), len(ranks) == 1
    parts = {"exposed_data": "data loading", "computation": "computation"}
    more = {
        name: min(_each(rank, name) for rank in summary.ranks if rank.rank in ranks)
        - float(lower_median(np.array([_each(rank, name) for rank in summary.ranks])))
        for name in parts
    }
    longer = [f"{word} {duration_text(1e3 * max(0.0, more[name]))}" for name, word in parts.items()]
    evidence = f"more than the typical rank in a step: {', '.join(longer)}"
    advice = (
        f"Look at the host of {names} and at its own code between the operators; mark an input that is no "
        "DataLoader with torch.profiler.record_function('hvdkit:data')."
    )
    kind, what = "host", f"{'comes' if few else 'come'} late, neither by input nor by operators"
    if more["exposed_data"] >= max(lost / 2, more["computation"]):
        kind = "input"
    elif more["computation"] >= lost / 2:
        kind = "compute"
    if kind != "host":
        what, advice = doing(kind, ranks), ADVICE[kind].format(who=names)
    return _cause(summary, kind, lost, evidence, f"{who} {what}.", advice, ranks)


def _exchange(summary: TraceSummary) -> Cause:
    if summary.skew_note:
        lost = max(_each(rank, "exposed") for rank in summary.ranks)
        evidence = f"exposed communication; ranks are not compared ({summary.skew_note})"
        what = "A rank exchanges data or waits for a later one; which of both its trace alone does not say."
        return _cause(summary, "late", lost, evidence, what, "Give the traces of all ranks of the run.")
    left = [_each(rank, "exposed") - (rank.waiting or 0.0) for rank in summary.ranks]
    evidence = "exposed communication, without the wait for later ranks, mean of the ranks"
    what = "Collectives run while nothing is computed."
    lost = max(0.0, sum(left) / len(left))
    return _cause(summary, "large-tensors", lost, evidence, what, SENTENCES["large-tensors"][1])
