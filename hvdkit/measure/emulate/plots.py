"""The distribution of the delays, and the delays by size, on Matplotlib's axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.common.units import bytes_text
from hvdkit.measure.emulate import analysis as analyses
from hvdkit.measure.emulate.analysis import EmulateSummary
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.emulate.spread import distribution

CURVES = 6
"""Up to so many sizes are drawn one by one beside all together."""
_BLUE, _BAND, _RED = "#0072b2", "#56b4e9", "#d55e00"


def cdf(axes: Any, results: EmulateResults, analysis: EmulateSummary) -> None:
    """Draw the share of collectives that took at most so long, with its 95 % band."""
    found = analyses.cdf(results)
    x = _visible(found.values) * 1000
    axes.fill_between(
        x, found.low, found.high, step="post", color=_BAND, alpha=0.3, linewidth=0, label="95% band (DKW)"
    )
    if 1 < len(analysis.rows) <= CURVES:
        sizes = np.array([one.nbytes for one in results.samples])
        all_delays = np.array([one.slowest_s for one in results.samples], dtype=float)
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

    x = [one.nbytes for one in results.samples]
    y = _visible(np.array([one.slowest_s for one in results.samples], dtype=float)) * 1000
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
