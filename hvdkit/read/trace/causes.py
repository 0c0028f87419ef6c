"""Numbers to causes: what costs a step of the traces time, who causes it and what to do."""

from __future__ import annotations

from hvdkit.common.causes import WORTH_SAYING, Cause, rank_names, to_blame
from hvdkit.common.units import duration_text, share_text
from hvdkit.read.trace.results import Rank, Skew, Summary

_MUCH = 0.1
"""Share of a step below which data loading and exchanges of all ranks are as they should be."""
_MS = 1e-3


def causes(summary: Summary) -> list[Cause]:
    """What costs time in the traces of a run, in no order; ``common.causes.dearest_first`` weighs it."""
    found = [_input_everywhere(summary)]
    if summary.skew is None:
        found.append(_one_trace(summary))
    else:
        found += [_late(summary, summary.skew), _exchange(summary, summary.skew)]
    return [cause for cause in found if cause is not None]


def otherwise(summary: Summary) -> str:
    """The verdict where no cause is worth a sentence."""
    share = sum(rank.times.computation for rank in summary.ranks) / sum(
        rank.times.window or 1 for rank in summary.ranks
    )
    return (
        f"Nothing that these traces show costs {share_text(WORTH_SAYING)} or more; {share_text(share)} of the time is "
        "computation."
    )


def _each(rank: Rank, name: str) -> float:
    """Milliseconds of a step in a part of ``Times``."""
    return float(getattr(rank.times, name)) / max(1, len(rank.steps))


def _lower_median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _cause(
    summary: Summary, kind: str, lost: float, what: str, evidence: str, advice: str, ranks: tuple[int, ...] = ()
) -> Cause:
    step = max(_each(rank, "window") for rank in summary.ranks) or 1.0
    stepped = all(rank.steps for rank in summary.ranks)
    return Cause(kind, lost * _MS, lost / step, what, evidence, advice, per_step=stepped, ranks=ranks)


def _late(summary: Summary, skew: Skew) -> Cause:
    costs = {one.rank: one.cost for one in skew.ranks}
    ranks = to_blame(costs)
    lost = sum(costs[rank] for rank in ranks or costs)
    if not ranks:
        return _cause(
            summary,
            "random-late",
            lost,
            "Now this rank is late and now that one.",
            f"time of the ranks in {skew.collectives} collectives",
            "Even out what a step has to do (batches of unequal length), and give each rank cores of its own.",
        )
    names = rank_names(ranks)
    comes = f"{names} {'come' if len(ranks) > 1 else 'comes'} late, and the others wait"
    more = {
        name: min(_each(rank, name) for rank in summary.ranks if rank.rank in ranks)
        - _lower_median([_each(rank, name) for rank in summary.ranks])
        for name in ("exposed_data", "computation")
    }
    evidence = "more than the typical rank in a step: " + ", ".join(
        f"{word} {duration_text(1e3 * max(0.0, more[name]))}"
        for name, word in (("exposed_data", "data loading"), ("computation", "computation"))
    )
    if more["exposed_data"] >= max(lost / 2, more["computation"]):
        advice = f"Speed up the input of {names.lower()}: more workers, prefetching, a local copy of its data."
        return _cause(summary, "input", lost, f"{comes}: for its input.", evidence, advice, ranks)
    if more["computation"] >= lost / 2:
        advice = f"Look at the size of the batches of {names.lower()}, its cores or clock (hvdkit preflight)."
        return _cause(summary, "compute", lost, f"{comes}: it computes longer.", evidence, advice, ranks)
    advice = (
        f"Look at the host of {names.lower()} and at its own code between the operators; mark an input that is no "
        "DataLoader with torch.profiler.record_function('hvdkit:data')."
    )
    return _cause(
        summary, "host", lost, f"{comes}: neither for its DataLoader nor for its operators.", evidence, advice, ranks
    )


def _exchange(summary: Summary, skew: Skew) -> Cause | None:
    waits = {one.rank: one.waiting for one in skew.ranks}
    left = [_each(rank, "exposed") - waits[rank.rank or 0] for rank in summary.ranks]
    lost = max(0.0, sum(left) / len(left))
    cause = _cause(
        summary,
        "large-tensors",
        lost,
        "Ranks exchange data while nothing is computed.",
        "exposed communication, without the wait for later ranks, mean of the ranks",
        "Send less or less often (fp16 compression, accumulation, a larger batch), or over a faster network.",
    )
    return cause if cause.share >= _MUCH else None


def _one_trace(summary: Summary) -> Cause | None:
    lost = max(_each(rank, "exposed") for rank in summary.ranks)
    cause = _cause(
        summary,
        "late",
        lost,
        "A rank exchanges data or waits for a later one; which of both its trace alone does not say.",
        f"exposed communication; ranks are not compared ({summary.skew_note})",
        "Give the traces of all ranks of the run.",
    )
    return cause if cause.share >= _MUCH else None


def _input_everywhere(summary: Summary) -> Cause | None:
    lost = min(_each(rank, "exposed_data") for rank in summary.ranks)
    cause = _cause(
        summary,
        "input-everywhere",
        lost,
        "Every rank waits for its input.",
        "exposed data loading, of the rank with the least",
        "More workers of the DataLoader, prefetching, a cache of the decoded data.",
    )
    return cause if cause.share >= _MUCH else None
