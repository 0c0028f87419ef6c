"""Speed-up and efficiency with their intervals and the ideal, and where a step goes, on Matplotlib's axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdkit.common import plot
from hvdkit.common.intervals import Estimate
from hvdkit.common.units import interval_text, number_text, ranks_text
from hvdkit.errors import DataError
from hvdkit.measure.bench.analysis import ScalingRow, ScalingSummary

CURVES_SIZE = (6.0, 4.0)
_PARTS = {"input": "#e69f00", "compute": "#56b4e9", "communication": "#0072b2", "wait": "#999999"}
_BLUE, _RED = "#0072b2", "#d55e00"


def write(analysis: ScalingSummary, path: Path, *sources: Path) -> None:
    """Draw speed-up and efficiency to a file, completely or not at all.

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
    if not measured(analysis):
        raise DataError("nothing can be drawn: no job counts; measure with `hvdkit bench scaling` first.")
    width, height = CURVES_SIZE
    draws = [lambda axes: speedup(axes, analysis), lambda axes: efficiency(axes, analysis)]
    plot.write(path, *draws, size=(width, 2 * height), sources=sources)


def measured(analysis: ScalingSummary) -> list[ScalingRow]:
    """The numbers of ranks that are drawn."""
    return [row for row in analysis.rows if row.speedup is not None]


def with_parts(analysis: ScalingSummary) -> list[ScalingRow]:
    """Those whose steps are known part by part."""
    return [row for row in analysis.rows if row.parts is not None and row.step_s]


def speedup(axes: Any, analysis: ScalingSummary) -> None:
    """Work per second compared with the smallest number of ranks."""
    rows = measured(analysis)
    base = rows[0].ranks
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: number_text(value))
    _curve(axes, rows, [row.speedup for row in rows], lambda ranks: ranks / base)
    axes.set_ylabel(f"Speed-up compared with {ranks_text(base)}")


def efficiency(axes: Any, analysis: ScalingSummary) -> None:
    """Speed-up for each rank that was added."""
    rows = measured(analysis)
    _curve(axes, rows, [row.efficiency for row in rows], lambda _: 1.0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("Efficiency")


def parts(axes: Any, analysis: ScalingSummary) -> None:
    """Where a step goes, one bar for each number of ranks, the fewest above."""
    rows = with_parts(analysis)
    names = [_marked(row, ranks_text(row.ranks)) for row in rows]
    done = [0.0] * len(rows)
    for part, colour in _PARTS.items():
        lengths = [1000 * (getattr(row.parts, part) or 0.0) for row in rows]
        axes.barh(names, lengths, left=done, color=colour, height=0.7, label=part)
        done = [before + length for before, length in zip(done, lengths, strict=True)]
    for name, end, row in zip(names, done, rows, strict=True):
        text = f"{number_text(1000 * (row.step_s or 0.0))} ms"
        axes.annotate(text, (end, name), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="mean of a step (ms)", xlim=(0, 1.12 * max(done)))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(_PARTS), frameon=False)


def said(rows: Sequence[ScalingRow], name: str) -> str:
    """A curve in words, for who cannot see it; ``name``: "speedup" or "efficiency"."""
    return ", ".join(f"{interval_text(getattr(row, name))} on {ranks_text(row.ranks)}" for row in rows)


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
    axes.set_xticks(ranks, [_marked(row, str(row.ranks)) for row in rows], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _marked(row: ScalingRow, text: str) -> str:
    return f"{text}*" if row.oversubscribed else text
