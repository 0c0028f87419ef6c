"""What was found: as tables, and drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdkit.common import plot
from hvdkit.common.intervals import Estimate
from hvdkit.common.table import Page, Table
from hvdkit.common.units import change_text, interval_text, number_text, ranks_text
from hvdkit.errors import DataError
from hvdkit.measure.bench.analysis import ScalingRow, ScalingSummary, otherwise
from hvdkit.measure.bench.results import STEPS
from hvdkit.read.causes import verdict

_PARTS = ("between", "input", "compute", "communication", "wait")
_SIZE = (6.0, 8.0)
_BLUE, _RED = "#0072b2", "#d55e00"


def page(analysis: ScalingSummary) -> Page:
    """The verdict, the tables and the notes."""
    return Page([*verdict(analysis.causes, otherwise(analysis)), *tables(analysis)], analysis.notes)


def tables(analysis: ScalingSummary) -> list[Table]:
    """How it scales, where a step goes and the fitted laws, as far as they are known."""
    in_ms = analysis.mode == "weak" and analysis.measure == STEPS
    measured = "the closing line" if analysis.measure else "nothing, since no job counts"
    if analysis.measure == STEPS:
        measured = "the time of a step" if in_ms else "the time of all steps"
    title = f"{analysis.mode.capitalize()} scaling, by {measured}; medians with 95% intervals"
    rows = []
    for row in analysis.rows:
        repeats = f"{row.repeats} ({row.failed} failed)" if row.failed else row.repeats
        seconds = None if row.seconds is None else interval_text(row.seconds.scaled(1000 if in_ms else 1))
        ratios = [None if one is None else interval_text(one) for one in (row.speedup, row.efficiency)]
        rows.append([_marked(row), repeats, seconds, *ratios])
    names = ("ranks", "repeats", "step ms" if in_ms else "seconds", "speed-up", "efficiency")
    found = [Table(title, names, rows)]
    with_parts = [(row, row.parts) for row in analysis.rows if row.parts is not None]
    if with_parts:
        inside = any(parts.communication is None for _, parts in with_parts)
        what = "compute holds communication and the wait for ranks that compute longer" if inside else "mean ms"
        lines = []
        for row, parts in with_parts:
            steps = (row.step_s, *(getattr(parts, name) for name in _PARTS))
            begin = (row.startup_s, row.first_step_s)
            lines.append(
                [
                    row.ranks,
                    *(None if seconds is None else _ms(seconds) for seconds in steps),
                    *(None if seconds is None else f"{seconds:.3g}" for seconds in begin),
                ]
            )
        headings = ("ranks", "step ms", *_PARTS, "start-up s", "first step s")
        found.append(Table(f"Where a step goes ({what})", headings, lines))
    if analysis.fits:
        columns = ("fit", "parameters", "residuals")
        lines = []
        for fit in analysis.fits:
            parameters = ", ".join(f"{name} {interval_text(estimate)}" for name, estimate in fit.parameters.items())
            residuals = ", ".join(f"{n}: {change_text(residual)}" for n, residual in fit.residuals.items())
            lines.append([f"{fit.name}: {fit.formula}", parameters, residuals])
        found.append(Table("Fitted laws", columns, lines, left=columns))
    return found


def _marked(row: ScalingRow) -> object:
    return f"{row.ranks}*" if row.oversubscribed else row.ranks


def _ms(seconds: float) -> str:
    return "0" if 0 <= seconds < 5e-8 else number_text(1000 * seconds, 4)


def draw(analysis: ScalingSummary, path: Path, *sources: Path) -> None:
    """Draw speed-up and efficiency with their intervals and the ideal to a file, completely or not at all.

    Args:
        analysis: what was found.
        path: the file, whose name ends in one of ``plot.FORMATS``.
        sources: what was read, which ``path`` must not be.
    Raises:
        DataError: nothing was measured, or the file cannot be written.
        InvalidArgumentError: another ending.
        MissingFrameworkError: Matplotlib is not installed.
    """
    plot.check(path)
    rows = [row for row in analysis.rows if row.speedup is not None]
    if not rows:
        raise DataError("nothing can be drawn: no job counts; measure with `hvdkit bench scaling` first.")
    draws = [lambda axes: speedup(axes, rows), lambda axes: efficiency(axes, rows)]
    plot.write(path, *draws, size=_SIZE, sources=sources)


def speedup(axes: Any, rows: Sequence[ScalingRow]) -> None:
    """Work per second compared with the smallest number of ranks, on Matplotlib's axes."""
    base = rows[0].ranks
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: number_text(value))
    _curve(axes, rows, [row.speedup for row in rows], lambda ranks: ranks / base)
    axes.set_ylabel(f"Speed-up compared with {ranks_text(base)}")


def efficiency(axes: Any, rows: Sequence[ScalingRow]) -> None:
    """Speed-up for each rank that was added, on Matplotlib's axes."""
    _curve(axes, rows, [row.efficiency for row in rows], lambda _: 1.0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("Efficiency")


def _curve(
    axes: Any, rows: Sequence[ScalingRow], values: Sequence[Estimate | None], ideal: Callable[[int], float]
) -> None:
    """The ideal, the values with their intervals, and the numbers of ranks below, on a logarithmic axis."""
    ranks = [row.ranks for row in rows]
    known = [one or Estimate(float("nan")) for one in values]
    middles = [one.value for one in known]
    below = [0.0 if one.low is None else one.value - one.low for one in known]
    above = [0.0 if one.high is None else one.high - one.value for one in known]
    axes.plot(ranks, [ideal(n) for n in ranks], color=_RED, linestyle="--", linewidth=1.2, label="ideal")
    axes.errorbar(ranks, middles, [below, above], color=_BLUE, marker="s", capsize=4, label="median, 95% interval")
    if any(row.oversubscribed for row in rows):
        crowded = [(row.ranks, value) for row, value in zip(rows, middles, strict=True) if row.oversubscribed]
        style = {"color": _BLUE, "marker": "s", "markerfacecolor": "white", "linestyle": "", "zorder": 5}
        axes.plot(*zip(*crowded, strict=True), **style, label="* more ranks than cores")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(_marked(row)) for row in rows], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
