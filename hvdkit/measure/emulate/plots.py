"""The distribution of the delays, and the delays by size, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np

from hvdkit.common.extras import of_extra
from hvdkit.common.files import replacing
from hvdkit.common.units import bytes_text
from hvdkit.measure.emulate import analysis as analyses
from hvdkit.measure.emulate.analysis import Analysis
from hvdkit.measure.emulate.results import Results
from hvdkit.measure.emulate.spread import distribution

with of_extra("report", "The plots of hvdkit emulate are drawn with Matplotlib"):
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogFormatter

CURVES = 6
"""Up to so many sizes are drawn one by one beside all together."""
_STYLE: Any = {"svg.hashsalt": "hvdkit", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
_BLUE, _BAND, _RED = "#0072b2", "#56b4e9", "#d55e00"


def write_cdf(path: Path, results: Results, analysis: Analysis) -> None:
    """Draw the share of collectives that took at most so long, with its 95 % band, to an SVG or PNG file.

    Raises:
        InvalidArgumentError: the path is a directory.
        DataError: it cannot be written.
    """
    with replacing(path) as file:
        cdf(file, path.suffix[1:].lower(), results, analysis)


def write_delays(path: Path, results: Results, analysis: Analysis) -> None:
    """Draw the delay of every collective by its size, both on logarithmic axes, to an SVG or PNG file.

    Raises:
        InvalidArgumentError: the path is a directory.
        DataError: it cannot be written.
    """
    with replacing(path) as file:
        delays(file, path.suffix[1:].lower(), results, analysis)


def cdf(file: IO[bytes], format_: str, results: Results, analysis: Analysis) -> None:
    """Draw the distribution into a file; ``format_`` is "svg" or "png"."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure()
        found = analyses.cdf(results)
        x = _visible(found.values) * 1000
        axes.fill_between(
            x, found.low, found.high, step="post", color=_BAND, alpha=0.3, linewidth=0, label="95 % band (DKW)"
        )
        if 1 < len(analysis.rows) <= CURVES:
            sizes = np.array([one.nbytes for one in results.samples])
            all_delays = np.array([one.slowest_s for one in results.samples], dtype=float)
            for row in analysis.rows:
                own = distribution(all_delays[sizes == row.nbytes])
                axes.step(
                    _visible(own.values) * 1000,
                    own.shares,
                    where="post",
                    linewidth=1,
                    label=bytes_text(row.nbytes or 0),
                )
        axes.step(x, found.shares, where="post", color=_BLUE, linewidth=2, label="all collectives")
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("delay of the slowest rank (ms)")
        axes.set_ylabel("share of collectives that took at most so long")
        axes.set_title(_title(analysis), fontsize=10)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
        _save(figure, file, format_)


def delays(file: IO[bytes], format_: str, results: Results, analysis: Analysis) -> None:
    """Draw the delays by size into a file; ``format_`` is "svg" or "png"."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure()
        x = [one.nbytes for one in results.samples]
        y = _visible(np.array([one.slowest_s for one in results.samples], dtype=float)) * 1000
        axes.scatter(x, y, s=9, color=_BLUE, alpha=0.35, linewidths=0, label="one collective", rasterized=len(x) > 5000)
        sizes = [row.nbytes or 0 for row in analysis.rows]
        medians = [1000 * row.slowest.p50.value for row in analysis.rows]
        axes.plot(sizes, medians, color=_RED, marker="o", markersize=4, linewidth=1.2, label="median")
        transfers = [1000 * row.transfer.p50.value for row in analysis.rows]
        axes.plot(
            sizes,
            transfers,
            color="#444444",
            linestyle="--",
            linewidth=1,
            label="median from the last rank's arrival on",
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        _plain_numbers(axes.yaxis)
        axes.set_xlabel("size of the collective")
        axes.set_ylabel("delay of the slowest rank (ms)")
        axes.set_title(_title(analysis), fontsize=10)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
        _save(figure, file, format_)


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _plain_numbers(axis: Any) -> None:
    """20 and 50, not powers of ten, on a logarithmic axis of milliseconds."""
    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _visible(values: Any) -> Any:
    """A logarithmic axis has no 0: what is below a nanosecond is drawn there."""
    return np.maximum(values, 1e-9)


def _title(analysis: Analysis) -> str:
    asked = analysis.asked
    return (
        f"{asked.collective}, engine {asked.engine}, {asked.ranks} ranks, {analysis.overall.slowest.count} collectives"
    )


def _save(figure: Figure, file: IO[bytes], format_: str) -> None:
    metadata = {"Date": None} if format_ == "svg" else {}
    figure.savefig(file, format=format_, dpi=150, metadata=metadata)
