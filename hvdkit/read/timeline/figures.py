"""The figures of the report, drawn without a browser, so that they are there in print and without scripts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from hvdkit.common.drawing import (
    LABEL,
    Figure,
    Line,
    Path,
    Rect,
    Text,
    Unit,
    Upright,
    bar_path,
    joined,
    line_through,
    number,
    shown_name,
    ticks,
    unit_for,
)
from hvdkit.common.units import duration_text, shortened
from hvdkit.read.timeline.lanes import Lanes
from hvdkit.read.timeline.measures import Floats
from hvdkit.read.timeline.model import GROUPS, group_of
from hvdkit.read.timeline.results import Steps, TensorSummary

WIDTH = 900.0
POINTS = 400
"""How many steps are drawn one by one; of more, the shortest, the middle and the longest of each stretch."""
PRINTED_LANES = 40
LEAST_BINS = 8


def step_times(steps: Steps) -> Figure | None:
    """How long each step took; None when there are not two steps."""
    durations = steps.durations
    if not len(durations):
        return None
    later = durations[1:] if len(durations) > 1 else durations
    highest = float(later.max())
    usual = float(np.median(later))
    top = highest if highest <= 4 * usual or usual <= 0 else max(4 * usual, float(np.percentile(later, 95)) * 1.2)
    top = max(top, 1e-3) * 1.05
    unit = unit_for(top)
    figure = Figure(
        "step-times",
        "Time per step",
        f"{len(durations)} steps, half of them above {duration_text(usual)}, the longest after the first "
        f"{duration_text(highest)}, the first {duration_text(float(durations[0]))}.",
        WIDTH,
        260,
    )
    left, right, above, below = 62.0, WIDTH - 70, 14.0, 214.0
    count = len(durations)

    def x(step: float) -> float:
        return left + (right - left) * (step + 0.5) / count

    def y(time: float) -> float:
        return below - (below - above) * min(time, top) / top

    title = f"time per step ({unit.name})"
    _vertical_axis(figure, y, top=top, scale=unit.microseconds, left=left, right=right, title=title)
    for step in ticks(count - 1, 10):
        if step == int(step):
            figure.marks.append(Text(x(step), below + 16, number(step), "middle"))
    figure.marks.append(Text((left + right) / 2, below + 36, "step", "middle axis"))
    _step_marks(figure, durations, x, y, top, unit)
    figure.marks.append(Line(left, y(usual), right, y(usual), "median"))
    figure.marks.append(Text(right + 6, y(usual) + 4, f"p50 {unit.of(usual)}", "small"))
    return figure


def _step_marks(
    figure: Figure,
    durations: Floats,
    x: Callable[[float], float],
    y: Callable[[float], float],
    top: float,
    unit: Unit,
) -> None:
    """Draw the steps' durations: each one, or bands of many; what is beyond the scale as a triangle at the ``top``."""
    count = len(durations)
    if count <= POINTS:
        middles = [(float(step), float(time)) for step, time in enumerate(durations)]
    else:
        edges = np.linspace(0, count, POINTS + 1).astype(int)
        parts = [(a, durations[a:b]) for a, b in pairwise(edges.tolist()) if b > a]
        centres = [float(start + (len(part) - 1) / 2) for start, part in parts]
        highs = [(x(c), y(float(part.max()))) for c, (_, part) in zip(centres, parts, strict=True)]
        lows = [(x(c), y(float(part.min()))) for c, (_, part) in zip(centres, parts, strict=True)]
        figure.marks.append(Path(line_through(highs + lows[::-1]) + "z", "band"))
        middles = [(c, float(np.median(part))) for c, (_, part) in zip(centres, parts, strict=True)]
    figure.marks.append(Path(line_through([(x(step), y(time)) for step, time in middles]), "curve"))
    if count <= POINTS:
        size = 5.0 if count <= 150 else 3.0
        for step, time in middles:
            if time <= top:
                tip = f"step {step:.0f}: {unit.of(time)}"
                figure.marks.append(Rect(x(step) - size / 2, y(time) - size / 2, size, size, "point", tip))
    beyond = np.flatnonzero(durations > top)
    for step in beyond[np.argsort(-durations[beyond])][:POINTS]:
        place = x(float(step))
        figure.marks.append(Path(f"M{place - 4:.1f} 12h8l-4 -8z", "beyond"))
    if len(beyond):
        worst = int(beyond[np.argmax(durations[beyond])])
        text = (
            f"beyond the scale: {len(beyond)}, the longest step {worst} with {duration_text(float(durations[worst]))}"
        )
        near_left = x(worst) < WIDTH / 2
        figure.marks.append(Text(x(worst) + (9 if near_left else -9), 11, text, "small" if near_left else "small end"))


def tensor_bars(tensors: Sequence[TensorSummary]) -> Figure | None:
    """What the operations of each tensor spent their time on, one bar per tensor; None without operations."""
    if not tensors:
        return None
    rows = [[one.phases[group].total if group in one.phases else 0.0 for group in GROUPS] for one in tensors]
    top = max(max(sum(row) for row in rows), 1e-3)
    unit = unit_for(top)
    left, right, line = 250.0, WIDTH - 76, 20.0
    figure = Figure(
        "tensor-phases",
        "Time per tensor, by phase",
        f"The {len(tensors)} tensors with the most time. "
        f"The first, {shortened(shown_name(tensors[0].tensor), LABEL)}, spent "
        + ", ".join(f"{duration_text(value)} on {group}" for group, value in zip(GROUPS, rows[0], strict=True) if value)
        + ".",
        WIDTH,
        line * len(rows) + 50,
    )
    below = line * len(rows) + 4

    def x(time: float) -> float:
        return left + (right - left) * time / top

    for tick in ticks(top / unit.microseconds, 6):
        place = x(tick * unit.microseconds)
        figure.marks.append(Line(place, 0, place, below, "grid"))
        figure.marks.append(Text(place, below + 15, number(tick), "middle"))
    title = f"sum over all operations ({unit.name}); operations of a fused batch run at the same time"
    figure.marks.append(Text((left + right) / 2, below + 36, title, "middle axis"))
    for index, (one, row) in enumerate(zip(tensors, rows, strict=True)):
        y = index * line + 3
        name = shown_name(one.tensor)
        figure.marks.append(Text(left - 8, y + 12, shortened(name, LABEL), "end", name))
        done = 0.0
        for group, value in enumerate(row):
            if value > 0:
                tip = f"{shortened(name, 120)}, {GROUPS[group]}: {duration_text(value)}"
                figure.marks.append(Rect(x(done), y, x(done + value) - x(done), line - 5, f"g{group}", tip))
                done += value
        figure.marks.append(Text(x(done) + 5, y + 12, duration_text(done), "small"))
    return figure


def histogram(
    name: str,
    title: str,
    values: Counter[int],
    *,
    horizontal: str,
    vertical: str,
    label: Callable[[float], str],
    scale: float = 1.0,
    shown: Callable[[float], str] = number,
) -> Figure | None:
    """A histogram whose bin k holds what is at least 2**(k-1) and less than 2**k (bin 0: nothing at all).

    Args:
        values: bin to height.
        horizontal, vertical: titles of the axes.
        label: text for a bound of a bin.
        scale: what one unit of the vertical axis is worth.
        shown: text for a height.
    """
    if not values:
        return None
    low, high = min(values), max(values)
    spare = max(0, LEAST_BINS - (high - low + 1))
    low, high = max(0, low - spare // 2), high + spare - spare // 2
    largest = max(values, key=lambda bin_: values[bin_])

    def bound(bin_: int) -> float:
        return 0.0 if bin_ <= 0 else 2.0 ** (bin_ - 1)

    figure = Figure(
        name,
        title,
        f"{title}: most ({shown(values[largest])}) from {label(bound(largest))} to {label(bound(largest + 1))}; "
        f"in all from {label(bound(min(values)))} to {label(bound(max(values) + 1))}.",
        300,
        220,
    )
    left, right, above, below = 56.0, 278.0, 14.0, 166.0
    top = max(max(values.values()), 1e-9) * 1.05

    def y(value: float) -> float:
        return below - (below - above) * value / top

    _vertical_axis(figure, y, top=top, scale=scale, left=left, right=right, title=vertical)
    wide = (right - left) / (high - low + 1)
    every = max(1, math.ceil((high - low + 2) * 50 / (right - left)))
    for bin_ in range(low, high + 2):
        place = left + (bin_ - low) * wide
        if (bin_ - low) % every == 0:
            figure.marks.append(Line(place, below, place, below + 4, "rule"))
            figure.marks.append(Text(place, below + 16, label(bound(bin_)), "middle small"))
        if values.get(bin_):
            tip = f"{label(bound(bin_))} to {label(bound(bin_ + 1))}: {shown(values[bin_])}"
            figure.marks.append(Rect(place + 0.5, y(values[bin_]), wide - 1, below - y(values[bin_]), "g5", tip))
    figure.marks.append(Text((left + right) / 2, below + 38, horizontal, "middle axis"))
    return figure


def _vertical_axis(
    figure: Figure, y: Callable[[float], float], *, top: float, scale: float, left: float, right: float, title: str
) -> None:
    for tick in ticks(top / scale):
        place = y(tick * scale)
        figure.marks.append(Line(left, place, right, place, "grid" if tick else "rule"))
        figure.marks.append(Text(left - 6, place + 4, number(tick), "end"))
    figure.marks.append(Upright(12, (y(0) + y(top)) / 2, title))


def printed_lanes(lanes: Lanes) -> Figure | None:
    """The window as a fixed picture, one lane per tensor; None without operations."""
    names = lanes.names[:PRINTED_LANES]
    if not names:
        return None
    first, last = lanes.first, max(lanes.shown_until, lanes.first + 1.0)
    unit = unit_for(last - first)
    left, right, above, line = 210.0, WIDTH - 12, 34.0, 18.0
    below = above + line * len(names) + 2
    figure = Figure(
        "lanes-printed",
        "Operations of each tensor over time",
        f"{len(lanes.operations)} operations of {len(lanes.names)} tensors in {duration_text(last - first)}, "
        f"{lanes.chosen}.",
        WIDTH,
        below + 40,
    )

    def x(time: float) -> float:
        return left + (right - left) * (min(max(time, first), last) - first) / (last - first)

    for tick in ticks((last - first) / unit.microseconds, 8):
        place = x(first + tick * unit.microseconds)
        figure.marks.append(Line(place, above, place, below, "grid"))
        figure.marks.append(Text(place, below + 15, number(tick), "middle"))
    title = f"time since {first / 1e6:.6f} s of the recording ({unit.name})"
    figure.marks.append(Text((left + right) / 2, below + 34, title, "middle axis"))
    apart = 0.0
    for step, begin in lanes.steps:
        if begin <= last:
            figure.marks.append(Line(x(begin), above - 12, x(begin), below, "step"))
            if x(begin) >= apart and x(begin) < right - 40:
                figure.marks.append(Text(x(begin) + 3, above - 6, f"step {step}", "small"))
                apart = x(begin) + 60
    for index, (name, bars) in enumerate(zip(names, _bars(lanes, names, x), strict=True)):
        y = above + index * line + 2
        shown = shown_name(name)
        figure.marks.append(Text(left - 8, y + 11, shortened(shown, 30), "end", shown))
        for group, parts in enumerate(bars):
            if parts:
                figure.marks.append(Path(bar_path(joined(parts, 0.3), y, line - 4), f"g{group}"))
    return figure


def _bars(lanes: Lanes, names: Sequence[str], x: Callable[[float], float]) -> list[list[list[tuple[float, float]]]]:
    """For each tensor and each group of phases, from where to where it takes place."""
    lane_of = {name: index for index, name in enumerate(names)}
    bars: list[list[list[tuple[float, float]]]] = [[[] for _ in GROUPS] for _ in names]
    for operation in lanes.operations:
        index = lane_of.get(operation.tensor)
        if index is None or operation.begin > lanes.shown_until:
            continue
        if operation.negotiate_start is not None and operation.negotiate_end is not None:
            bars[index][0].append((x(operation.negotiate_start), x(operation.negotiate_end)))
        for phase in operation.phases:
            bars[index][GROUPS.index(group_of(phase.name))].append((x(phase.start), x(phase.end)))
    return bars


def bytes_label(size: float) -> str:
    """A bound of a bin of sizes, with binary prefixes: 64 KiB."""
    for name, factor in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if size >= factor:
            return f"{number(size / factor)} {name}"
    return f"{number(size)} B"
