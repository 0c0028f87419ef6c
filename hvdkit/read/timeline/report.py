"""A recording as one HTML page that needs nothing else. The browser draws it.

Everything that came from the file is text on the page: the templates escape it, the data of the script is JSON without
any character that HTML could read, and a Content-Security-Policy allows the one script and style sheet by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import hvdkit
from hvdkit.common.units import printable, shortened
from hvdkit.errors import InvalidArgumentError, of_extra
from hvdkit.read.timeline.cli import lines, tensor_table
from hvdkit.read.timeline.columns import collect
from hvdkit.read.timeline.reader import GROUPS, CycleMark, Operation, Recording, group_of, read
from hvdkit.read.timeline.results import Steps, TensorSummary, TimelineSummary, otherwise
from hvdkit.read.timeline.summary import nothing_in, summarize

with of_extra("report", "HTML reports need the package jinja2"):
    import jinja2

LABEL = 34
"""Characters of a name that fit beside a bar."""
LONGEST_NAME = 1000
"""Characters of a name that are kept at all."""
OPERATIONS = 3000
"""Operations that the page holds: about 450 kB."""
TENSORS = 20
"""Tensors that it lists."""
_POINTS = 400
"""How many steps are drawn one by one; of more, the shortest, the middle and the longest of each stretch."""
_STEPS = 3
"""How many steps are drawn operation by operation when no part is chosen."""


def render_report(source: str | Path | Recording, step: int | None = None) -> str:
    """The page as text. The numbers are those of the whole recording; some steps are shown operation by operation.

    The file is read twice as a stream: memory is that of ``summarize``, and the size of the page is bounded whatever
    the size of the recording.

    Args:
        source: a timeline file or a recording.
        step: the training step that is shown so, from 0; by default a few steps of usual length.
    Raises:
        DataError: the file cannot be read, or holds no operation of Horovod.
        InvalidArgumentError: the recording has no such step.
    """
    given = source if isinstance(source, Recording) else read(source)
    columns = collect(given)
    summary = summarize(given, columns)
    if not summary.operations:
        raise nothing_in(given.path, summary)
    lanes = _lanes(Recording(given.path), *_choose_window(summary, step), summary)
    templates = jinja2.PackageLoader("hvdkit.read.timeline")
    page = jinja2.Environment(loader=templates, autoescape=True, undefined=jinja2.StrictUndefined)
    folder = resources.files("hvdkit.read.timeline") / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    tensors = sorted(summary.tensors[:TENSORS], key=lambda tensor: sum(_group_times(tensor)), reverse=True)
    table = tensor_table(tensors, len(summary.tensors), LABEL)
    subtitle = "Recorded by rank 0 with HOROVOD_TIMELINE"
    started = summary.start_time_since_epoch
    if started is not None and 0 <= started < 4e15:
        subtitle += f", started {datetime.fromtimestamp(started / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"
    said = dict(lines(summary))
    steps = 0 if summary.steps is None else len(summary.steps.durations)
    return page.get_template("report.html.j2").render(
        version=hvdkit.__version__,
        style=style,
        style_hash=_content_hash(style),
        title=f"Timeline of {_shown_name(Path(summary.path).name)}",
        subtitle=f"{subtitle}. All numbers but those of the last part are of the whole recording.",
        script=script,
        script_hash=_content_hash(script),
        facts=[
            (label.strip().capitalize(), *text.partition(", ")[::2])
            for label, text in said.items()
            if label not in ("late ranks", "dropped")
        ],
        notes=[
            f"Late ranks: {said['late ranks']}.",
            *([f"Not used: {said['dropped']}."] if any(summary.dropped.values()) else []),
        ],
        otherwise=otherwise(summary),
        findings=[
            {"sentence": printable(f"{one.sentence()} Seen: {one.evidence}."), "advice": printable(one.advice)}
            for one in summary.causes
        ],
        steps=steps > 0,
        step_bands="" if steps <= _POINTS else str(math.ceil(steps / _POINTS)),
        tensor_groups=[(index, group) for index, group in enumerate(GROUPS) if group in table.names],
        table=table,
        tensors=list(zip([_shown_name(one.tensor) for one in tensors], table.words(), strict=True)),
        lanes=lanes,
        page_data={
            "groupNames": list(GROUPS),
            "lanes": lanes["data"],
            "steps": None if summary.steps is None else _step_points(summary.steps),
            "tensors": [[shortened(_shown_name(one.tensor), LABEL), _group_times(one)] for one in tensors],
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
    edges = np.linspace(0, len(durations), min(len(durations), _POINTS) + 1).astype(int)
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


def _choose_window(summary: TimelineSummary, step: int | None) -> tuple[float, float, str]:
    """The start and the end of the part to draw, in microseconds, and in words which part that is."""
    begins = [] if summary.steps is None else summary.steps.begins.tolist()
    end = summary.origin + summary.duration + 1.0
    if step is not None:
        if step >= len(begins):
            has = f"steps 0 to {len(begins) - 1}" if begins else "no steps (no tensor is reduced three times)"
            raise InvalidArgumentError(f"step is {step}; the recording has {has}.")
        return begins[step], begins[step + 1] if step + 1 < len(begins) else end, f"step {step}"
    if summary.steps is None or summary.steps.duration is None or len(begins) < 3:
        return summary.origin, end, "the whole recording"
    # the first run of steps after the first step that takes about as long as usual, or the nearest to that
    durations, usual = summary.steps.durations, summary.steps.duration.p50
    count = min(_STEPS, len(durations) - 1)
    away = np.abs(np.convolve(durations[1:], np.ones(count), "valid") - count * usual)
    near = np.flatnonzero(away <= 0.02 * count * usual)
    start = 1 + int(near[0] if len(near) else away.argmin())
    stop = start + count
    steps = f"step {start}" if stop == start + 1 else f"steps {start} to {stop - 1}"
    return begins[start], begins[stop], f"{steps}, of usual length"


def _lanes(recording: Recording, first: float, last: float, chosen: str, summary: TimelineSummary) -> dict[str, Any]:
    """A part of a recording operation by operation, for the script of the page and in words.

    The script draws numbers and names only; times are microseconds since ``first``. An operation is [lane, kind, begin,
    end of negotiation or null, start, end, bytes or null, [phase, start, end, ...], last rank or null, its lateness].
    """
    total, cycles = 0, list[float]()

    def touching() -> Iterator[Operation]:
        nonlocal total
        for item in recording.items():
            if isinstance(item, CycleMark):
                if first <= item.time <= last and len(cycles) < OPERATIONS:
                    cycles.append(item.time)
            elif item.begin < last and item.end >= first:
                total += 1
                yield item

    kept = heapq.nsmallest(OPERATIONS + 1, touching(), key=lambda operation: operation.begin)
    shown_until = last if len(kept) <= OPERATIONS else max(kept.pop().begin, first)
    places = [f"{(time - summary.origin) / 1e6:.6f}" for time in (first, shown_until, last)]
    lanes = {name: lane for lane, name in enumerate(dict.fromkeys(operation.tensor for operation in kept))}
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(_shown_name(text), len(words))

    def after(time: float) -> float:
        return round(time - first, 1)

    operations = []
    for operation in kept:
        phases: list[float] = []
        for phase in sorted(operation.phases, key=lambda one: one.start):
            phases += (word(phase.name), after(phase.start), after(phase.end))
        late = sorted(operation.ticks.items(), key=lambda tick: tick[1])
        operations.append(
            [
                lanes[operation.tensor],
                word(operation.kind),
                after(operation.begin),
                None if operation.negotiate_end is None else after(operation.negotiate_end),
                after(operation.start),
                after(operation.end),
                operation.bytes,
                phases,
                late[-1][0] if len(late) > 1 else None,
                round(late[-1][1] - late[0][1], 1) if len(late) > 1 else 0,
            ]
        )
    steps = [] if summary.steps is None else summary.steps.begins.tolist()
    count, tensors, left_out = f"{len(kept):,}", f"{len(lanes):,}", ""
    if total > len(kept):
        left_out = (
            f"this part has {total:,} operations, of which the page holds the first {count}; it ends before "
            f"{places[2]} s, where the part does. Choose one step with --step."
        )
    return {
        "data": {
            "origin": round(first - summary.origin, 1),
            "length": round(max(shown_until - first, 1.0), 1),
            "lanes": [_shown_name(name) for name in lanes],
            "words": list(words),
            "groups": [GROUPS.index(group_of(text)) for text in words],
            "operations": operations,
            "cycles": [after(time) for time in cycles if time <= shown_until],
            "steps": [[number, after(begin)] for number, begin in enumerate(steps) if first <= begin <= shown_until],
        },
        "note": f"{chosen[:1].upper()}{chosen[1:]}: {places[0]} to {places[1]} s of the recording, {count} operations "
        f"on {tensors} tensors. One lane per tensor; grey is time of an operation outside of its phases.",
        "left_out": left_out,
        "label": f"{count} operations of {tensors} tensors, {chosen}.",
    }


def _shown_name(name: str) -> str:
    """A name from a file as it may appear on a page: of bounded length, no character that hides or turns text."""
    return printable(shortened(name, LONGEST_NAME))


def _content_hash(text: str) -> str:
    """A script or style sheet as a Content-Security-Policy names it (W3C CSP Level 3, section 2.3.1)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
