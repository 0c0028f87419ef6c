"""What was found, drawn: speed-up and efficiency with their intervals and the ideal, and where a step goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hvdkit.common.drawing import Figure, Line, Mark, Path, Rect, Text, Upright, number, ticks
from hvdkit.common.intervals import Estimate
from hvdkit.common.units import interval_text
from hvdkit.measure.bench.analysis import Analysis, Row, ranks_text

WIDTH = 560.0
HEIGHT = 330.0
_LEFT, _RIGHT, _ABOVE, _BELOW = 66.0, WIDTH - 18, 34.0, HEIGHT - 52
PARTS = (("input", "g0"), ("compute", "g4"), ("communication", "g5"), ("wait", "g7"))
"""The parts of a step with their colours."""


@dataclass(frozen=True)
class _Scale:
    """From numbers of ranks and values to places on the surface; both logarithmic where ``steep``."""

    ranks: tuple[int, ...]
    low: float
    high: float
    steep: bool

    def x(self, ranks: float) -> float:
        first, last = math.log2(self.ranks[0]), math.log2(self.ranks[-1])
        share = 0.5 if last == first else (math.log2(ranks) - first) / (last - first)
        return _LEFT + 24 + (_RIGHT - _LEFT - 48) * share

    def y(self, value: float) -> float:
        low, high, value = (max(one, 1e-12) if self.steep else one for one in (self.low, self.high, value))
        if self.steep:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        return _BELOW - (_BELOW - _ABOVE) * (min(max(value, low), high) - low) / (high - low)


def speedup(analysis: Analysis) -> Figure | None:
    """Work per second compared with the smallest number of ranks; None where nothing was measured."""
    rows = _measured(analysis)
    if not rows:
        return None
    base = rows[0].ranks
    values = [value for row in rows if row.speedup for value in _ends(row.speedup)]
    low = 2.0 ** math.floor(math.log2(max(min([1.0, *values]), 1e-3)))
    high = 2.0 ** math.ceil(math.log2(max([2.0, rows[-1].ranks / base, *values])))
    scale = _Scale(tuple(row.ranks for row in rows), low, high, steep=True)
    marks = [low * 2**power for power in range(round(math.log2(high / low)) + 1)]
    figure = _figure(
        "speedup", f"Speed-up compared with {ranks_text(base)}", rows, scale, marks, lambda ranks: ranks / base
    )
    _points(figure, rows, scale, lambda row: row.speedup)
    return figure


def efficiency(analysis: Analysis) -> Figure | None:
    """Speed-up for each rank that was added; None where nothing was measured."""
    rows = _measured(analysis)
    if not rows:
        return None
    values = [value for row in rows if row.efficiency for value in _ends(row.efficiency)]
    high = max([1.0, *values]) * 1.08
    scale = _Scale(tuple(row.ranks for row in rows), 0.0, high, steep=False)
    figure = _figure("efficiency", "Efficiency", rows, scale, ticks(high), lambda _: 1.0)
    _points(figure, rows, scale, lambda row: row.efficiency)
    return figure


def parts(analysis: Analysis) -> Figure | None:
    """Where a step goes, one bar for each number of ranks; None without recorded steps."""
    rows = [row for row in analysis.rows if row.parts is not None and row.step_s]
    if not rows:
        return None
    longest = max(row.step_s or 0.0 for row in rows)
    unit, factor = ("ms", 1e3) if longest < 1 else ("s", 1.0)
    line, left, right = 26.0, 90.0, 820.0
    below = line * len(rows) + 4
    said = "; ".join(f"{ranks_text(row.ranks)}: {number(factor * (row.step_s or 0.0))} {unit}" for row in rows)
    figure = Figure("parts", "Where a step goes", f"{said}.", 900.0, below + 44)
    for tick in ticks(longest * factor, 6):
        place = left + (right - left) * tick / (longest * factor)
        figure.marks += [Line(place, 0, place, below, "grid"), Text(place, below + 15, number(tick), "middle")]
    figure.marks.append(Text((left + right) / 2, below + 36, f"mean of a step ({unit})", "middle axis"))
    for index, row in enumerate(rows):
        y = index * line + 3
        figure.marks.append(Text(left - 8, y + 15, ranks_text(row.ranks) + ("*" if row.oversubscribed else ""), "end"))
        done = left
        for name, style in PARTS:
            seconds = getattr(row.parts, name) or 0.0
            wide = (right - left) * seconds / longest
            if wide > 0:
                tip = f"{ranks_text(row.ranks)}, {name}: {number(seconds * factor)} {unit}"
                figure.marks.append(Rect(done, y, wide, line - 6, style, tip))
                done += wide
        figure.marks.append(Text(done + 5, y + 15, f"{number((row.step_s or 0.0) * factor)} {unit}", "small"))
    return figure


def stacked(figures: Sequence[Figure], title: str) -> Figure:
    """The figures under each other, as one."""
    whole = Figure("scaling", title, " ".join(one.description for one in figures), WIDTH, 0.0)
    for one in figures:
        whole.marks += [_lower(mark, whole.height) for mark in one.marks]
        whole.height += one.height
    return whole


def _lower(mark: Mark, by: float) -> Mark:
    if isinstance(mark, Line):
        return replace(mark, y1=mark.y1 + by, y2=mark.y2 + by)
    if isinstance(mark, Path):
        raise TypeError("a path cannot be moved")
    return replace(mark, y=mark.y + by)


def _measured(analysis: Analysis) -> list[Row]:
    return [row for row in analysis.rows if row.speedup is not None]


def _ends(estimate: Estimate) -> list[float]:
    return [value for value in (estimate.low, estimate.value, estimate.high) if value is not None]


def _figure(
    name: str, title: str, rows: Sequence[Row], scale: _Scale, marks: Sequence[float], ideal: Callable[[float], float]
) -> Figure:
    """The axes, the ideal and the legend."""
    attribute = "speedup" if name == "speedup" else "efficiency"
    said = ", ".join(f"{interval_text(getattr(row, attribute))} on {ranks_text(row.ranks)}" for row in rows)
    figure = Figure(name, title, f"{title}: {said}.", WIDTH, HEIGHT)
    add = figure.marks.append
    for value in marks:
        style = "rule" if value == marks[0] else "grid"
        add(Line(_LEFT, scale.y(value), _RIGHT, scale.y(value), style))
        add(Text(_LEFT - 6, scale.y(value) + 4, number(value), "end"))
    for row in rows:
        add(Text(scale.x(row.ranks), _BELOW + 16, f"{row.ranks}{'*' if row.oversubscribed else ''}", "middle"))
    add(Text((_LEFT + _RIGHT) / 2, _BELOW + 36, "ranks", "middle axis"))
    add(Upright(14, (_ABOVE + _BELOW) / 2, title))
    first, last = scale.ranks[0], scale.ranks[-1]
    add(Line(scale.x(first), scale.y(ideal(first)), scale.x(last), scale.y(ideal(last)), "ideal"))
    add(Line(_LEFT + 4, 14, _LEFT + 26, 14, "ideal"))
    add(Text(_LEFT + 31, 18, "ideal", "small"))
    add(Rect(_LEFT + 76, 10.5, 7, 7, "point"))
    add(Text(_LEFT + 88, 18, "median, 95% interval", "small"))
    if any(row.oversubscribed for row in rows):
        add(Rect(_LEFT + 226, 10.5, 7, 7, "crowded"))
        add(Text(_LEFT + 238, 18, "* more ranks than cores", "small"))
    return figure


def _points(figure: Figure, rows: Sequence[Row], scale: _Scale, value: Callable[[Row], Estimate | None]) -> None:
    """A point with its interval for each row, and a line through the points."""
    places = []
    for row in rows:
        found = value(row)
        if found is None:
            continue
        x, y = scale.x(row.ranks), scale.y(found.value)
        places.append((x, y))
        if found.low is not None and found.high is not None:
            low, high = scale.y(found.low), scale.y(found.high)
            figure.marks.append(Line(x, low, x, high, "error"))
            figure.marks += [Line(x - 5, end, x + 5, end, "error") for end in (low, high)]
    figure.marks += [Line(*before, *after, "through") for before, after in pairwise(places)]
    for row, (x, y) in zip(rows, places, strict=True):
        style = "crowded" if row.oversubscribed else "point"
        found = value(row)
        tip = "" if found is None else f"{ranks_text(row.ranks)}: {interval_text(found)}"
        figure.marks.append(Rect(x - 3.5, y - 3.5, 7, 7, style, tip))
