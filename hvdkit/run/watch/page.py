"""A run as one HTML page that needs nothing else, in light and in dark; everything from the files is text on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdkit.common import render
from hvdkit.common.drawing import Figure, Line, Rect, Text, line_through, number, shown_name, ticks
from hvdkit.common.drawing import Path as Curve
from hvdkit.common.render import Fact
from hvdkit.common.table import Table
from hvdkit.common.units import duration_text, printable
from hvdkit.run.watch.history import HistoryWindow
from hvdkit.run.watch.results import Watched
from hvdkit.run.watch.view import HEAT, height, memory_text, progress_text, series, speed_texts, time_text

_PACKAGE = "hvdkit.run.watch"
_WIDTH, _HEIGHT, _LEFT, _BELOW = 380, 150, 52, 20
_MOST_POINTS, _MOST_CURVES, _MOST_RANKS, _MOST_REPORTS = 300, 12, 64, 200


def write_page(seen: Watched, windows: Sequence[HistoryWindow], output: Path) -> None:
    """Write the page, completely or not at all.

    Args:
        seen: the run now.
        windows: for the curves.
        output: the file.
    Raises:
        DataError, InvalidArgumentError: it cannot be written.
        MissingFrameworkError: jinja2 is not installed.
    """
    render.write(output, lambda: page(seen, windows), Path(seen.path))


def page(seen: Watched, windows: Sequence[HistoryWindow]) -> str:
    """The page as text; its size is bounded, however long the training."""
    curves = list(series(windows).items())[:_MOST_CURVES]
    steps = [one.step for one in windows]
    return render.page(
        _PACKAGE,
        render.resource("hvdkit.read.timeline", "report.css") + render.resource(_PACKAGE, "page.css"),
        title=shown_name(Path(seen.path).parent.name or seen.path),
        subtitle=f"{shown_name(seen.path)}, step {seen.step}, {seen.state}.",
        verdict=f"No straggler, slowdown or bad number was reported up to step {seen.step}.",
        facts=_facts(seen),
        notes=[f"Step {one.step}: {printable(one.text)}" for one in seen.reports[-_MOST_REPORTS:]],
        curves=[curve(f"curve-{at}", name, steps, values) for at, (name, values) in enumerate(curves)],
        ranks=_bars(seen) if seen.ranks else None,
        table=_table(seen),
    )


def _facts(seen: Watched) -> list[Fact]:
    progress, *of_it = progress_text(seen).split("  ")
    speed, *others = speed_texts(seen)
    logs = [Fact(shown_name(name), "-" if one is None else number(one)) for name, one in seen.logs.items()]
    jobs = "" if seen.jobs == 1 else f"{seen.jobs} jobs took part"
    return [
        Fact("Progress", progress, ", ".join(of_it)), Fact("Speed", speed, ", ".join(others)),
        Fact("Ranks", str(seen.world_size), jobs), *logs[:_MOST_CURVES],
    ]  # fmt: skip


def curve(name: str, title: str, steps: Sequence[int], values: Sequence[float | None]) -> Figure:
    """A value over the steps; gaps where it was not finite."""
    every = max(1, len(steps) // _MOST_POINTS)
    kept = [*range(0, len(steps) - 1, every), len(steps) - 1]
    known = [one for at in kept if (one := values[at]) is not None] or [0.0]
    low, high = min(known), max(known)
    first, last = steps[kept[0]], steps[kept[-1]]

    def x(step: float) -> float:
        share: float = (step - first) / max(1, last - first)
        return _LEFT + (_WIDTH - _LEFT - 8) * share

    def y(value: float) -> float:
        return _HEIGHT - _BELOW - 6 - (_HEIGHT - _BELOW - 16) * height(value, low, high)

    text = f"{shown_name(title)} from step {first} to {last}: {number(low)} to {number(high)}."
    figure = Figure(name, shown_name(title), text, _WIDTH, _HEIGHT)
    for value in ticks(high, 4, low) if high - low > 1e-290 else [low]:
        figure.marks += [Line(_LEFT, y(value), _WIDTH - 8, y(value), "grid")]
        figure.marks += [Text(_LEFT - 5, y(value) + 4, number(value), "small end")]
    for step in dict.fromkeys((first, last)):
        style = "small end" if step == last else "small"
        figure.marks.append(Text(x(step), _HEIGHT - 4, f"step {step}", style))
    part: list[tuple[float, float]] = []
    parts = [part]
    for at in kept:
        value = values[at]
        if value is None:
            parts.append(part := [])
        else:
            part.append((x(steps[at]), y(value)))
    figure.marks += [Curve(line_through(points), "curve") for points in parts if len(points) > 1]
    figure.marks += [Rect(px - 2, py - 2, 4, 4, "point") for points in parts if len(points) == 1 for px, py in points]
    return figure


def _bars(seen: Watched) -> Figure:
    """The ranks' own time, the slowest first, coloured by how far they are behind the median."""
    shown = seen.ranks[:_MOST_RANKS]
    most = max((one.own_s or 0.0 for one in shown), default=0.0) or 1.0
    step = (_WIDTH - _LEFT - 8) / len(shown)
    slowest = shown[0]
    text = f"Own time of {len(shown)} ranks, the slowest first: rank {slowest.rank} takes {time_text(slowest.own_s)}."
    figure = Figure("ranks", "Own time of a step, the slowest rank first", text, _WIDTH, _HEIGHT)
    for value in ticks(most, 3):
        at = _HEIGHT - _BELOW - (_HEIGHT - _BELOW - 14) * value / most
        text = duration_text(1e6 * value)
        figure.marks += [Line(_LEFT, at, _WIDTH - 8, at, "grid"), Text(_LEFT - 5, at + 4, text, "small end")]
    for at, one in enumerate(shown):
        level = next(index for index, (limit, *_) in enumerate(HEAT) if seen.behind(one) <= limit)
        tall = (_HEIGHT - _BELOW - 14) * (one.own_s or 0.0) / most
        tip = f"rank {one.rank}: {time_text(one.own_s)}, {seen.behind(one):.2f} times the median"
        figure.marks.append(
            Rect(_LEFT + at * step, _HEIGHT - _BELOW - tall, max(1.0, 0.85 * step), tall, f"heat{level}", tip)
        )
        if len(shown) <= 16:
            figure.marks.append(Text(_LEFT + (at + 0.42) * step, _HEIGHT - 5, str(one.rank), "small middle"))
    return figure


def _table(seen: Watched) -> Table:
    rows = [
        (
            one.rank, time_text(one.own_s), f"{seen.behind(one):.2f}", time_text(one.step_s), time_text(one.input_s),
            time_text(one.compute_s), time_text(one.wait_s), memory_text(one.rss), memory_text(one.device),
        )
        for one in seen.ranks[:_MOST_RANKS]
    ]  # fmt: skip
    left_out = seen.world_size - len(rows)
    names = ("rank", "own time", "of median", "step", "input", "compute", "wait", "memory", "device")
    return Table("", names, rows, note=f"{left_out} faster ranks are left out." if left_out > 0 else "")
