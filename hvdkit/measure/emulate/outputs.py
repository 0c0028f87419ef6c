"""The files that a run is turned into where they are asked for: plots of the delays, and a report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from hvdkit.common import plot as drawing
from hvdkit.common.commands import PATH, output_file
from hvdkit.common.units import bytes_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate import analysis as analyses
from hvdkit.measure.emulate.analysis import EmulateSummary
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.emulate.spread import distribution

CURVES = 6
"""Up to so many sizes are drawn one by one beside all together."""
_BLUE, _BAND, _RED = "#0072b2", "#56b4e9", "#d55e00"
Files = Mapping[str, Path | None]
"""By name: ``plot``, the distribution of the delays; ``size_plot``, the delays by size; ``report``, an HTML page."""
OPTIONS = tuple(
    click.option(option, type=PATH, callback=output_file, metavar="FILE", help=what)
    for option, what in (
        ("--plot", "Draw the distribution of the delays (.svg, .png, .pdf)."),
        ("--size-plot", "Draw the delays by size (.svg, .png, .pdf)."),
        ("--report", "Write an HTML page."),
    )
)
"""What asks for ``Files``."""


def check(files: Files, other: Path | None) -> None:
    """Find out before anything is measured whether these files can be made.

    Args:
        files: those that are asked for.
        other: a file that is read or written too, which none of these may take the place of.
    Raises:
        MissingFrameworkError: matplotlib or jinja2 is needed and not installed.
        InvalidArgumentError: a plot ends in none of ``plot.FORMATS``, or two of the files are one.
    """
    wanted = {name: path for name, path in files.items() if path is not None}
    paths = [path for path in (*wanted.values(), other) if path is not None]
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise InvalidArgumentError(f"The file {str(path)!r} is named for two things; give each a file of its own.")
    for name, path in wanted.items():
        if name != "report":
            drawing.check(path)
    if wanted:
        drawing.require()
    if "report" in wanted:
        import hvdkit.measure.emulate.report  # noqa: F401


def write_all(results: EmulateResults, analysis: EmulateSummary, files: Files) -> None:
    """Write the files that are asked for, each completely or not at all.

    Args:
        results: with at least one sample.
        analysis: of these results.
        files: as in ``check``.
    Raises:
        DataError: a file cannot be written.
    """
    for name, draw in (("plot", cdf), ("size_plot", delays)):
        if (path := files.get(name)) is not None:
            drawing.write(path, partial(draw, results=results, analysis=analysis))
    if (page := files.get("report")) is not None:
        from hvdkit.common import render
        from hvdkit.measure.emulate import report

        render.write(page, lambda: report.render_report(results, analysis))


def cdf(axes: Any, results: EmulateResults, analysis: EmulateSummary) -> None:
    """Draw the share of collectives that took at most so long, with its 95 % band."""
    found = analyses.cdf(results)
    x = _visible(found.values) * 1000
    axes.fill_between(
        x, found.low, found.high, step="post", color=_BAND, alpha=0.3, linewidth=0, label="95% band (DKW)"
    )
    if 1 < len(analysis.rows) <= CURVES:
        sizes, all_delays = results.column("nbytes"), results.column("slowest_s")
        for row in analysis.rows:
            own = distribution(all_delays[sizes == row.nbytes])
            label = bytes_text(row.nbytes or 0)
            axes.step(_visible(own.values) * 1000, own.shares, where="post", linewidth=1, label=label)
    axes.step(x, found.shares, where="post", color=_BLUE, linewidth=2, label="all collectives")
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set(ylim=(0, 1.02), xlabel="delay of the slowest rank (ms)")
    axes.set_ylabel("share of collectives that took at most so long")
    _finish(axes, analysis)


def delays(axes: Any, results: EmulateResults, analysis: EmulateSummary) -> None:
    """Draw the delay of every collective by its size, both on logarithmic axes."""
    from matplotlib.ticker import EngFormatter

    x, y = results.column("nbytes"), _visible(results.column("slowest_s")) * 1000
    axes.scatter(x, y, s=9, color=_BLUE, alpha=0.35, linewidths=0, label="one collective", rasterized=len(x) > 5000)
    sizes = [row.nbytes or 0 for row in analysis.rows]
    medians = [1000 * row.slowest.p50.value for row in analysis.rows]
    axes.plot(sizes, medians, color=_RED, marker="o", markersize=4, linewidth=1.2, label="median")
    transfers = [1000 * row.transfer.p50.value for row in analysis.rows]
    label = "median from the last rank's arrival on"
    axes.plot(sizes, transfers, color="#444444", linestyle="--", linewidth=1, label=label)
    axes.set(xscale="log", yscale="log", xlabel="size of the collective", ylabel="delay of the slowest rank (ms)")
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    _plain_numbers(axes.yaxis)
    _finish(axes, analysis)


def _plain_numbers(axis: Any) -> None:
    """20 and 50, not powers of ten, on a logarithmic axis of milliseconds."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _visible(values: Any) -> Any:
    """A logarithmic axis has no 0: what is below a nanosecond is drawn there."""
    return np.maximum(values, 1e-9)


def _finish(axes: Any, analysis: EmulateSummary) -> None:
    asked = analysis.asked
    title = f"{asked.collective}, engine {asked.engine}, {asked.ranks} ranks"
    axes.set_title(f"{title}, {analysis.overall.slowest.count} collectives", fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
