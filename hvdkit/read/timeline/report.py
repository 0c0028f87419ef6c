"""A recording as one HTML page that needs nothing else: no network, no server, no library. The browser draws it.

Everything that came from the file is text on the page: the templates escape it, the data of the script is JSON without
any character that HTML could read, and a Content-Security-Policy allows the one script and style sheet by their hashes.
"""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.common import render
from hvdkit.common.causes import dearest_first
from hvdkit.common.drawing import LABEL, number, shown_name
from hvdkit.common.render import Fact
from hvdkit.common.units import bytes_text, duration_text, printable, shortened
from hvdkit.errors import InvalidArgumentError
from hvdkit.read.timeline import show
from hvdkit.read.timeline.causes import causes, otherwise
from hvdkit.read.timeline.columns import Exchanges, collect, exchanges
from hvdkit.read.timeline.lanes import OPERATIONS, TENSORS, Lanes, choose_window, collect_lanes, lane_data
from hvdkit.read.timeline.measures import Distribution, Floats
from hvdkit.read.timeline.model import GROUPS, group_of
from hvdkit.read.timeline.reader import Recording, read
from hvdkit.read.timeline.results import TOGETHER, Skew, Steps, TensorSummary, TimelineSummary
from hvdkit.read.timeline.summary import FUSION_THRESHOLD, nothing_in, summarize

RANKS = 32
"""How many ranks are listed."""
POINTS = 400
"""How many steps are drawn one by one; of more, the shortest, the middle and the longest of each stretch."""


def render_report(
    source: str | Path | Recording,
    *,
    since: float | None = None,
    until: float | None = None,
    step: int | None = None,
    top: int = TENSORS,
    operations: int = OPERATIONS,
    ranks: int | None = None,
    fusion_threshold: int = FUSION_THRESHOLD,
) -> str:
    """The page as text. The numbers are those of the whole recording; a window of it is shown operation by operation.

    The file is read twice as a stream: memory is that of ``summarize``, and the size of the page is bounded by ``top``
    and ``operations`` whatever the size of the recording.

    Args:
        source: a timeline file or a recording.
        since, until: the window, in seconds since the first event of the recording.
        step: the window as a training step, from 0; by default a few steps of usual length.
        top: number of tensors to list, those with the most time.
        operations: number of operations that the page holds, at least 1; about 150 bytes each.
        ranks: of the job; by default what the recording says.
        fusion_threshold: bytes of the job's fusion buffer (HOROVOD_FUSION_THRESHOLD).
    Raises:
        DataError: the file cannot be read, or holds no operation of Horovod.
        InvalidArgumentError: the recording has no such step, or a number makes no sense.
    """
    if top < 1 or operations < 1:
        raise InvalidArgumentError(f"top is {top} and operations {operations}; expected numbers of at least 1.")
    given = source if isinstance(source, Recording) else read(source)
    columns = collect(given)
    summary = summarize(given, ranks=ranks, fusion_threshold=fusion_threshold, columns=columns)
    if not summary.operations:
        raise nothing_in(given.path, summary)
    lanes = collect_lanes(Recording(given.path), choose_window(summary, since, until, step), summary, operations)
    if not lanes.total:
        raise InvalidArgumentError(
            f"no operation between {(lanes.first - lanes.origin) / 1e6:.6g} and "
            f"{(lanes.last - lanes.origin) / 1e6:.6g} s of {str(given.path)!r}; it has operations from "
            f"{summary.since / 1e6:.6g} to {summary.until / 1e6:.6g} s."
        )
    every = exchanges(columns, np.ones(len(columns.begin), np.bool_))
    return _render(summary, every, lanes, top)


def _render(summary: TimelineSummary, every: Exchanges, lanes: Lanes, top: int) -> str:
    """The whole page as HTML."""
    script = render.resource("hvdkit.read.timeline", "report.js")
    histograms = _histograms(every)
    tensors = sorted(summary.tensors[:top], key=_phase_time, reverse=True)
    groups = [index for index, group in enumerate(GROUPS) if any(group in one.phases for one in tensors)]
    steps = summary.steps
    return render.page(
        "hvdkit.read.timeline",
        render.resource("hvdkit.read.timeline", "report.css"),
        title=f"Timeline of {shown_name(Path(summary.path).name)}",
        subtitle=_subtitle(summary),
        script=script,
        script_hash=render.content_hash(script),
        facts=[
            Fact(label.strip().capitalize(), *text.partition(", ")[::2])
            for label, text in show.lines(summary)
            if label not in ("rank skew", "dropped")
        ],
        notes=_notes(summary),
        otherwise=otherwise(summary),
        findings=[
            {"sentence": printable(f"{one.sentence()} Seen: {one.evidence}."), "advice": printable(one.advice)}
            for one in dearest_first(causes(summary))
        ],
        steps=steps is not None and len(steps.durations) > 0,
        step_bands=_steps_per_point(summary),
        tensor_groups=[(index, GROUPS[index]) for index in groups],
        tensor_count=len(summary.tensors),
        tensors=[_tensor_row(one, groups) for one in tensors],
        histograms=[(one["name"], one["title"]) for one in histograms],
        exchange_note=_exchange_note(every),
        skew=None if summary.skew is None else _skew_rows(summary.skew),
        no_skew=show.NO_SKEW,
        lane_note=_lane_note(lanes),
        lane_left_out=_lane_left_out(lanes),
        lane_label=f"{number(len(lanes.operations))} operations of {number(len(lanes.names))} tensors, {lanes.chosen}.",
        lane_groups=_lane_groups(lanes),
        page_data={
            "groupNames": list(GROUPS),
            "lanes": lane_data(lanes),
            "steps": None if steps is None else _step_points(steps),
            "tensors": [[shortened(shown_name(one.tensor), LABEL), _group_times(one)] for one in tensors],
            "histograms": histograms,
        },
    )


def _step_points(steps: Steps) -> dict[str, Any] | None:
    """How long each step took, [step, shortest, median, longest] of one or of many in a row; None without any."""
    durations = steps.durations
    if not len(durations):
        return None
    later = durations[1:] if len(durations) > 1 else durations
    usual, highest = float(np.median(later)), float(later.max())
    top = highest if highest <= 4 * usual or usual <= 0 else max(4 * usual, float(np.percentile(later, 95)) * 1.2)
    edges = np.linspace(0, len(durations), min(len(durations), POINTS) + 1).astype(int)
    parts = [(start, durations[start:end]) for start, end in pairwise(edges.tolist())]
    return {
        "count": len(durations),
        "usual": usual,
        "top": max(top, 1e-3),
        "longest": [int(durations.argmax()), float(durations.max())],
        "points": [
            [start + (len(part) - 1) / 2, float(part.min()), float(np.median(part)), float(part.max())]
            for start, part in parts
        ],
    }


def _group_times(one: TensorSummary) -> list[float]:
    return [one.phases[group].total if group in one.phases else 0.0 for group in GROUPS]


def _phase_time(one: TensorSummary) -> float:
    return sum(_group_times(one))


def _subtitle(summary: TimelineSummary) -> str:
    text = "Recorded by rank 0 with HOROVOD_TIMELINE"
    started = summary.start_time_since_epoch
    if started is not None and 0 <= started < 4e15:
        text += f", started {datetime.fromtimestamp(started / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"{text}. All numbers but those of the last part are of the whole recording."


def _notes(summary: TimelineSummary) -> list[str]:
    if not summary.dropped:
        return []
    reasons = ", ".join(f"{number(count)} x {reason}" for reason, count in summary.dropped.items())
    return [f"Not used, of {number(summary.events)} events: {reasons}."]


def _steps_per_point(summary: TimelineSummary) -> str:
    count = 0 if summary.steps is None else len(summary.steps.durations)
    return "" if count <= POINTS else str(math.ceil(count / POINTS))


def _tensor_row(one: TensorSummary, groups: list[int]) -> dict[str, Any]:
    parts: list[Distribution | None] = [one.phases.get(GROUPS[index]) for index in groups]
    parts.append(one.phases.get("whole"))
    return {
        "name": shown_name(one.tensor),
        "short": shortened(shown_name(one.tensor), LABEL),
        "total": _ms(_phase_time(one)),
        "kind": shown_name(one.kind),
        "count": number(one.count),
        "bytes": "unknown" if one.bytes is None else bytes_text(one.bytes),
        "cells": ["" if part is None else f"{_ms(part.p50)} / {_ms(part.p99)}" for part in parts],
    }


def _ms(microseconds: float) -> str:
    return number(round(microseconds, 1) / 1000)


def _histograms(every: Exchanges) -> list[dict[str, Any]]:
    """Sizes and durations of exchanges: bins as [number of ``_binned``, height]; those without any are left out."""
    known = ~np.isnan(every.bytes)
    found = [
        ("number-by-size", "Number by size", "bytes", "exchanges", _binned(every.bytes[known])),
        ("time-by-size", "Time by size", "bytes", "time", _binned(every.bytes[known], every.times[known])),
        ("number-by-duration", "Number by duration", "time", "exchanges", _binned(every.times)),
    ]
    names = ("name", "title", "horizontal", "vertical")
    return [{**dict(zip(names, row, strict=True)), "bins": sorted(bins.items())} for *row, bins in found if bins]


def _binned(values: Floats, weights: Floats | None = None) -> Counter[int]:
    """How many values (or their weights) are in each bin: bin k is at least 2**(k-1) and less than 2**k, bin 0 nothing.

    Args:
        values: at least 0.
        weights: of the values; 1 each by default.
    """
    numbers = np.frexp(np.floor(values))[1]
    sums = np.bincount(numbers, weights)
    return Counter({int(bin_): round(float(sums[bin_])) for bin_ in np.unique(numbers)})


def _exchange_note(every: Exchanges) -> str:
    text = "Exchanges between ranks; a fused batch counts once, with the bytes of all its tensors."
    unknown = int(np.isnan(every.bytes).sum())
    if unknown:
        text += f" The size of {number(unknown)} is not in the file; they are in the last figure only."
    return text


def _skew_rows(skew: Skew) -> dict[str, Any]:
    ranks = sorted(skew.ranks, key=lambda one: -one.last)
    rows = [
        (str(one.rank), number(one.last), _ms(one.late.p50), _ms(one.late.p99), _ms(one.late.max))
        for one in ranks[:RANKS]
    ]
    return {
        "operations": number(skew.operations),
        "spread": duration_text(skew.spread.p50),
        "together": duration_text(TOGETHER),
        "rows": rows,
        "left_out": max(0, len(ranks) - RANKS),
    }


def _lane_note(lanes: Lanes) -> str:
    since, until = ((time - lanes.origin) / 1e6 for time in (lanes.first, lanes.shown_until))
    return (
        f"{lanes.chosen[:1].upper()}{lanes.chosen[1:]}: {since:.6f} to {until:.6f} s of the recording, "
        f"{number(len(lanes.operations))} operations on {number(len(lanes.names))} tensors. One lane per tensor; grey "
        "is time of an operation outside of its phases."
    )


def _lane_left_out(lanes: Lanes) -> str:
    if not lanes.left_out:
        return ""
    return (
        f"this part has {number(lanes.total)} operations, of which the page holds the first "
        f"{number(len(lanes.operations))}; it ends before {(lanes.last - lanes.origin) / 1e6:.6f} s, where the part "
        "does. Choose a smaller part with --step, --since and --until, or hold more with --operations."
    )


def _lane_groups(lanes: Lanes) -> list[tuple[int, str]]:
    seen = {group_of(phase.name) for operation in lanes.operations for phase in operation.phases}
    if any(operation.negotiate_end is not None for operation in lanes.operations):
        seen.add("negotiate")
    return [(index, group) for index, group in enumerate(GROUPS) if group in seen]
