"""What was found: one table with its sentences, and the plot of the distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.common import plot
from hvdkit.common.intervals import Estimate
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, count_text, interval_text, ranks_text, share_text, shortened
from hvdkit.measure.emulate.analysis import EmulateSummary
from hvdkit.measure.emulate.check import BROADCAST
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.measure.emulate.results import EmulateResults

CURVES = 6
"""Up to so many sizes are drawn one by one beside all together."""
_LISTED = 10
_NAME = 40
_DIGITS = 4


def page(results: EmulateResults, analysis: EmulateSummary) -> Page:
    """The table and the notes."""
    asked, longest = analysis.asked, analysis.longest
    rows = [(str(row.nbytes), row) for row in analysis.rows] + [("all", analysis.overall)]
    note = "skew and transfer are medians in ms, the bandwidth that of the transfer"
    if analysis.step is not None:
        rows.append(("step", analysis.step))
        overlaps = "the longest of its collectives' delays, which overlap"
        note += f"; a step is {overlaps if asked.fusion else 'the sum of its delays'}"
    names = ["bytes", "samples", "p50", "p90", "p99", "p99.9", "max", "skew", "transfer", "algbw GB/s", "busbw GB/s"]
    cells = [
        [
            name,
            row.samples,
            *map(_ms, (row.p50_s, row.p90_s, row.p99_s, row.p999_s, row.max_s, row.skew_s)),
            None if row.transfer_s is None else _ms(row.transfer_s.value),
            None if row.algbw_bytes_per_s is None else f"{row.algbw_bytes_per_s.value / 1e9:.4g}",
            None if row.busbw_bytes_per_s is None else interval_text(row.busbw_bytes_per_s.scaled(1e-9), _DIGITS),
        ]
        for name, row in rows
    ]
    if asked.compression != "none":
        names.insert(3, f"p50 {asked.compression}")
        for line, (_, row) in zip(cells, rows, strict=True):
            line.insert(3, _ms(row.compressed_s))
    times = Table(
        f"{asked.collective}, engine {asked.engine}, {ranks_text(asked.ranks)}, {analysis.trials} trials: delay of "
        "the slowest rank in ms, with the median's 95% interval",
        names,
        cells,
        note=f"{note}.",
    )
    parts: list[Table | str] = [times]
    whole = analysis.step
    if whole is not None and whole.compressed_s is not None and whole.p50_s.value > 0:
        ratio = whole.compressed_s.value / whole.p50_s.value
        parts.append(f"With {asked.compression} a step takes {ratio:.3g} times as long as with none.")
    if len(analysis.ranks) > 1:
        slowest = max(analysis.ranks, key=lambda row: row.slowest)
        latest = max(analysis.ranks, key=lambda row: row.latest)
        name = shortened(results.plan.collectives[longest.index].name, _NAME)
        last = f", rank {latest.rank} comes last most often ({share_text(latest.latest)})"
        late = f"; rank {int(np.argmin(longest.ranks_s))} came last, {_ms(longest.skew_s)} ms after the first"
        if asked.collective == BROADCAST:  # its root waits for nobody, and has the shortest time whoever came last
            last = late = ""
        elif longest.skew_s < longest.slowest_s / 2:
            late = ""
        parts += [
            f"Rank {slowest.rank} takes longest most often ({share_text(slowest.slowest)}){last}.",
            f"The longest is {name} in trial {longest.trial}: {_ms(longest.slowest_s)} ms, longest on rank "
            f"{longest.slowest_rank}{late}.",
        ]
    return Page(parts, analysis.notes)


def plan_page(plan: ReplayPlan) -> Page:
    """A plan for a reader: its collectives in the order of their replay."""
    gaps = any(one.gap_s for one in plan.collectives)
    rows = [
        [number, shortened(one.name, _NAME), one.dtype, one.elements, one.nbytes]
        + ([f"{1000 * one.gap_s:.4g}"] if gaps else [])
        for number, one in enumerate(plan.collectives, start=1)
    ]
    names = ("order", "name", "dtype", "elements", "bytes", *(("gap ms",) if gaps else ()))
    said = [
        f"From {plan.source}.",
        f"{count_text(len(rows), 'collective')}, {plan.nbytes} bytes per step; {count_text(plan.trials, 'trial')}.",
    ]
    if len(rows) <= _LISTED:
        sizes = [one.nbytes for one in plan.collectives][::-1]
        said.append(f"Bytes, in the reverse order (first layer first): {sizes}")
    return Page([Table("Collectives of a step, in the order of their replay", names, rows, ("name", "dtype")), *said])


def _ms(seconds: Estimate | float | None) -> str | None:
    if isinstance(seconds, Estimate):
        return interval_text(seconds.scaled(1000), _DIGITS)
    return None if seconds is None else f"{1000 * seconds:.{_DIGITS}g}"


def draw(path: Path, results: EmulateResults, analysis: EmulateSummary) -> None:
    """Draw the share of collectives that took at most so long, with its 95 % band, to a file (see ``plot.write``)."""
    delays, sizes = results.column("slowest_s"), results.column("nbytes")

    def cdf(axes: Any) -> None:
        from matplotlib.ticker import LogFormatter

        def curve(seconds: Any, **style: Any) -> Any:
            x = np.maximum(np.sort(seconds), 1e-9) * 1000  # a logarithmic axis has no 0
            shares = np.arange(1, len(x) + 1) / len(x)
            axes.step(x, shares, where="post", **style)
            return x, shares

        if 1 < len(analysis.rows) <= CURVES:
            for row in analysis.rows:
                curve(delays[sizes == row.nbytes], linewidth=1, label=bytes_text(row.nbytes or 0))
        x, shares = curve(delays, color="#0072b2", linewidth=2, label="all collectives")
        low, high = (np.clip(shares + sign * analysis.cdf_band, 0, 1) for sign in (-1, 1))
        style = {"step": "post", "color": "#56b4e9", "alpha": 0.3, "linewidth": 0}
        axes.fill_between(x, low, high, label="95% band (DKW)", **style)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())  # 20 and 50, not powers of ten
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        axes.set(ylim=(0, 1.02), xlabel="delay of the slowest rank (ms)")
        axes.set_ylabel("share of collectives that took at most so long")
        asked = analysis.asked
        title = f"{asked.collective}, engine {asked.engine}, {ranks_text(asked.ranks)}, {len(delays)} delays"
        axes.set_title(title, fontsize=10)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=8)

    plot.write(path, cdf)
