"""A summary and its causes as text and as JSON; the verdict first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, duration_text, share_text, shortened
from hvdkit.read.causes import Cause, by_cost, verdict
from hvdkit.read.timeline.causes import causes, otherwise
from hvdkit.read.timeline.measures import Distribution
from hvdkit.read.timeline.model import GROUPS
from hvdkit.read.timeline.results import Bandwidth, Batches, Skew, Steps, TensorSummary, TimelineSummary

_NAME = 40
OPERATIONS = 3000
"""How many operations the page of a report holds when nothing else is said: about 450 kB."""
TENSORS = 20
"""How many tensors it lists when nothing else is said."""
NO_SKEW = "not available: record with hvdkit launch --timeline FILE --skew (horovodrun: run with --cache-capacity 0)"
"""What is said about ranks where nothing in the recording says which one was late."""


_TIMES = (
    "origin since until duration communication busy copies setup negotiating idle first first_setup negotiation alone "
    "late cost spread little_time cycle phases start_time_since_epoch"
)
"""Names of the fields that are microseconds."""


class SummaryFound(Document, frozen=True):
    """Where the time of a recording went; seconds, bytes, and bytes per second.

    Attributes:
        found: the summary.
        skew_note: how to get the skew of ranks where there is none.
        causes: what costs time in it, the one that costs the largest share first.
    """

    kind = "timeline-summary"
    schema = 4
    written_by = "hvdkit timeline summary --json"
    times = frozenset(_TIMES.split())
    unit_s = 1e-6

    found: TimelineSummary
    skew_note: str | None
    causes: tuple[Cause, ...]


def found_as(summary: TimelineSummary, top: int | None) -> SummaryFound:
    """The summary for a program.

    Args:
        summary: of a recording.
        top: number of tensors; None for all.
    """
    note = NO_SKEW if summary.skew is None else None
    return SummaryFound(replace(summary, tensors=summary.tensors[:top]), note, tuple(by_cost(causes(summary))))


def page(summary: TimelineSummary, top: int) -> Page:
    """The summary for people, the verdict first.

    Args:
        summary: as in ``found_as``.
        top: number of tensors to list.
    """
    found: list[Table | str] = [*verdict(causes(summary), otherwise(summary)), ""]
    found += [f"{label:<16}{text}" for label, text in lines(summary)]
    found.append(_table("kind", summary.kinds, lambda one: one.kind))
    if top:
        tensors = summary.tensors[:top]
        title = f"tensor ({len(tensors)} of {len(summary.tensors)})"
        found.append(_table(title, tensors, lambda one: shortened(one.tensor, _NAME)))
    found.append("each phase: median / 99th percentile in ms; bytes: of the largest operation")
    return Page(found)


def lines(summary: TimelineSummary) -> list[tuple[str, str]]:
    """The numbers of a recording, title and text each: the lines above the tables, and the top of the page."""
    parts = [
        (summary.communication, "in collectives"),
        (summary.copies, "in copies"),
        (summary.setup, "in NCCL's set-up"),
    ]
    lines = [
        (
            "recording",
            f"{duration_text(summary.since) if summary.since else '0 s'} to {duration_text(summary.until)}, "
            f"{summary.operations} operations on {len(summary.tensors)} tensors, "
            f"{summary.ranks or 'unknown number of'} ranks",
        ),
        (
            "communication",
            ", ".join(
                f"{duration_text(time)} ({share_text(time / (summary.duration or 1.0))}) {what}"
                for time, what in parts
                if time or time is summary.communication
            ),
        ),
    ]
    lines += _step_lines(summary.steps)
    lines += _batch_lines(summary.batches, summary.bandwidth)
    if summary.cycle is not None:
        lines.append(("cycles", f"{summary.cycle.count}: {_three(summary.cycle)}"))
    lines.append(("rank skew", _skew_text(summary.skew)))
    dropped = ", ".join(f"{count} x {reason}" for reason, count in summary.dropped.items())
    lines.append(("dropped", f"{dropped} (of {summary.events} events)" if dropped else "nothing"))
    return lines


def _step_lines(steps: Steps | None) -> list[tuple[str, str]]:
    if steps is None:
        return [("steps", "none found: no tensor is reduced three times")]
    size = "unknown size" if steps.bytes is None else bytes_text(steps.bytes)
    lines = [("steps", f"{steps.count} of {steps.tensors} tensors, {size} each")]
    if steps.first is not None:
        lines.append(("first step", duration_text(steps.first)))
    parts = (
        ("steps took" if steps.first is None else "other steps", steps.duration),
        ("  exchange", steps.communication),
        ("  no operation", steps.idle),
    )
    return lines + [(label, _three(part)) for label, part in parts if part is not None]


def _batch_lines(batches: Batches | None, bandwidth: Bandwidth | None) -> list[tuple[str, str]]:
    """The lines on fused exchanges and on bandwidth; none where nothing was reduced."""
    if batches is None:
        return []
    text = f"{batches.fused} fused"
    if batches.tensors is not None and batches.bytes is not None:
        fill = "" if batches.fill is None else f" ({share_text(batches.fill.p50)} of the threshold)"
        text += f", each {batches.tensors.p50:.0f} tensors and {bytes_text(batches.bytes.p50)}{fill} in the median"
    text += f", {batches.single} of one tensor ({batches.small} of at most 64 KB)"
    lines = [("exchanges", text)]
    if bandwidth is not None:
        bus = ""
        if bandwidth.bus is not None and bandwidth.best_bus is not None:
            bus = f"; bus {bytes_text(bandwidth.bus)}/s of {bytes_text(bandwidth.best_bus)}/s"
        share = share_text(bandwidth.share_of_best)
        best = f"{bytes_text(bandwidth.best_algorithm)}/s with {bytes_text(bandwidth.best_bytes)}"
        text = f"{bytes_text(bandwidth.algorithm)}/s, {share} of the best exchange ({best}){bus}"
        lines.append(("bandwidth", text))
    return lines


def _skew_text(skew: Skew | None) -> str:
    if skew is None:
        return NO_SKEW
    slow = max(skew.ranks, key=lambda rank: rank.last)
    return (
        f"in {skew.operations} measured operations the last rank came {duration_text(skew.spread.p50)} after the first "
        f"(median; max {duration_text(skew.spread.max)}); rank {slow.rank} was alone the last in {slow.last} of them"
    )


def _three(part: Distribution) -> str:
    return (
        f"p50 {duration_text(part.p50)}, p95 {duration_text(part.p95)}, p99 {duration_text(part.p99)}, "
        f"max {duration_text(part.max)}"
    )


def _table(title: str, rows: Sequence[TensorSummary], name: Callable[[TensorSummary], str]) -> Table:
    def phase(group: str) -> Callable[[TensorSummary], str]:
        def cell(one: TensorSummary) -> str:
            part = one.phases.get(group)
            return "" if part is None else f"{part.p50 / 1000:.3g} / {part.p99 / 1000:.3g}"

        return cell

    cells: dict[str, Callable[[TensorSummary], object]] = {
        title: name,
        "count": lambda one: one.count,
        "bytes": lambda one: "?" if one.bytes is None else bytes_text(one.bytes),
    }
    cells |= {group: phase(group) for group in (*GROUPS, "whole") if any(group in one.phases for one in rows)}
    return Table.of(rows, cells)
