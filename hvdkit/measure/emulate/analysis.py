"""What the measurements mean: times by size, bandwidth, skew apart from transfer, ranks; as a table and as a plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.common import plot
from hvdkit.common.allreduce import bus_factor
from hvdkit.common.intervals import CONFIDENCE, Estimate, median
from hvdkit.common.json_files import Document, Part
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, count_text, interval_text, ranks_text, share_text, shortened
from hvdkit.errors import DataError
from hvdkit.measure.emulate.check import BROADCAST
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.measure.emulate.results import EmulateAsked, EmulateResults, Sample
from hvdkit.observe.lateness import Floats

PERCENTILES = {"p90": (0.9, 10), "p99": (0.99, 100), "p99.9": (0.999, 1000)}
"""The share, and how many samples it needs: as many as make one beyond it likely. With fewer it is the maximum."""
CURVES = 6
"""Up to so many sizes are drawn one by one beside all together."""
_MUCH_SKEW = 0.5
"""Share of the median delay from which on the wait for late ranks is said aloud."""
_LISTED = 10
_NAME = 40
_DIGITS = 4


class TimesRow(Part, frozen=True, kw_only=True, rename={"nbytes": "size", "dtype": "type"}):
    """The delays of one size, of all sizes, or of whole steps; a delay is the longest of the ranks' own times.

    Attributes:
        nbytes: the size; None for all together, where sizes are mixed.
        count, dtype: elements and their type; None for all together, or where one size has several types.
        per_step: collectives of this size in a step.
        samples: how many delays.
        max_s: the longest of them.
        p50_s: their median, with its interval.
        p90_s, p99_s, p999_s: percentiles, by linear interpolation; None with fewer than 10, 100, 1000 samples.
        skew_s: median, from the first rank's arrival to the last one's; None for whole steps, as are the next three.
        transfer_s: median, from the last rank's arrival until the last rank is done.
        compressed_s: median with ``asked.compression``, with its interval; None without one.
        algbw_bytes_per_s, busbw_bytes_per_s: of the median transfer (all together: all bytes by all transfers, or by
            those of whole steps where they overlap); None where that is 0.
    """

    nbytes: int | None = None
    count: int | None = None
    dtype: str | None = None
    per_step: int
    samples: int
    max_s: float
    p50_s: Estimate
    p90_s: float | None
    p99_s: float | None
    p999_s: float | None
    skew_s: float | None = None
    transfer_s: Estimate | None = None
    compressed_s: Estimate | None = None
    algbw_bytes_per_s: Estimate | None = None
    busbw_bytes_per_s: Estimate | None = None


class RankRow(Part, frozen=True):
    """One rank.

    Attributes:
        rank: its number.
        slowest, latest: share of the collectives in which its own time was the longest, the shortest. Where ranks leave
            a collective together, the one with the shortest time is the one that came last.
    """

    rank: int
    slowest: float
    latest: float


class EmulateSummary(Document, frozen=True):
    """What follows from the samples.

    Attributes:
        asked: engine, ranks, hosts, ...
        trials: steps that were measured, the last one perhaps in part.
        rows: by size, the smallest first.
        overall: all sizes together.
        step: what a complete step takes, see ``of_steps``; None without one.
        ranks: by number.
        cdf_band: half the height of the band around the distribution of all delays, see ``band``.
        longest: the collective with the longest delay.
        notes: full sentences: what a reader should know.
        confidence: of the intervals.
    """

    kind = "emulate-summary"
    schema = 4
    written_by = "hvdkit emulate show --json"

    asked: EmulateAsked
    trials: int
    rows: tuple[TimesRow, ...]
    overall: TimesRow
    step: TimesRow | None
    ranks: tuple[RankRow, ...]
    cdf_band: float
    longest: Sample
    notes: tuple[str, ...]
    confidence: float = CONFIDENCE


def analyse(results: EmulateResults) -> EmulateSummary:
    """Everything that follows from the samples; the intervals are the same for the same samples.

    Raises:
        DataError: there is no sample.
    """
    samples, asked = results.samples, results.asked
    if not samples:
        raise DataError("Nothing was measured: there is no sample to analyse; run more trials.")
    rng = np.random.default_rng(0)
    rows = tuple(_row_of(results, size, rng) for size in np.unique(results.column("nbytes")).tolist())
    overall = _row_of(results, None, rng)
    steps = of_steps(results, results.column("slowest_s"))
    others = median(of_steps(results, compressed(results)), rng) if results.compressed and len(steps) else None
    own = np.array([sample.ranks_s for sample in samples], dtype=float)
    slowest, latest = Counter(sample.slowest_rank for sample in samples), Counter(own.argmin(axis=1).tolist())
    ranks = tuple(RankRow(rank, slowest[rank] / len(own), latest[rank] / len(own)) for rank in range(asked.ranks))
    return EmulateSummary(
        asked=asked,
        trials=len({sample.trial for sample in samples}),
        rows=rows,
        overall=overall,
        step=_times_row(steps, rng, per_step=1, compressed_s=others) if len(steps) else None,
        ranks=ranks,
        cdf_band=band(len(steps) if asked.fusion else len(samples)),
        longest=max(samples, key=lambda sample: sample.slowest_s),
        notes=(*results.notes, *_notes(rows, overall, ranks, asked)),
    )


def compressed(results: EmulateResults) -> Floats:
    """The delays of the compressed samples, in the order of the others."""
    return np.array([sample.slowest_s for sample in results.compressed])


def band(independent: int) -> float:
    """Half the height of a band that holds the true distribution everywhere at once with 95 % probability.

    ``independent``: samples that tell something new; at least 1 is supposed.

    Source: the inequality of Dvoretzky, Kiefer and Wolfowitz (Annals of Mathematical Statistics 27, 1956) with the
        constant of Massart (Annals of Probability 18, 1990): P(sup |F_n - F| > e) <= 2 exp(-2 n e^2).
    """
    return math.sqrt(math.log(2 / (1 - CONFIDENCE)) / (2 * max(1, independent)))


def _row_of(results: EmulateResults, size: int | None, rng: np.random.Generator) -> TimesRow:
    """The samples of one size; None for all together."""
    asked = results.asked
    collectives = [one for one in results.plan.collectives if size in (None, one.nbytes)]
    kinds = {(one.elements, one.dtype) for one in collectives}
    count, dtype = next(iter(kinds)) if size is not None and len(kinds) == 1 else (None, None)
    sizes, transfers = results.column("nbytes"), results.column("transfer_s")
    keep = slice(None) if size is None else sizes == size
    steps = of_steps(results, transfers) if size is None and asked.fusion else None
    transfer = median(transfers[keep], rng)
    if size is not None:
        moved, seconds = size, transfer
    elif steps is not None:
        moved, seconds = len(steps) * results.plan.nbytes, Estimate(float(steps.sum()))
    else:
        moved, seconds = int(sizes.sum()), Estimate(float(transfers.sum()))
    algbw = None
    if seconds.value > 0:
        low, high = (None if not end else moved / end for end in (seconds.high, seconds.low))
        algbw = Estimate(moved / seconds.value, low, high)
    return _times_row(
        results.column("slowest_s")[keep],
        rng,
        None if steps is None else len(steps),
        nbytes=size,
        count=count,
        dtype=dtype,
        per_step=len(collectives),
        skew_s=float(np.median(results.column("skew_s")[keep])),
        transfer_s=transfer,
        compressed_s=median(compressed(results)[keep], rng) if results.compressed else None,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if algbw is None else algbw.scaled(bus_factor(asked.collective, asked.ranks)),
    )


def _times_row(delays: Floats, rng: np.random.Generator, independent: int | None = None, **more: Any) -> TimesRow:
    """A row of delays in seconds, at least one.

    ``independent``: how many of them tell something new, where others repeat them; then there is no interval.
    """
    enough = len(delays) if independent is None else independent
    p90, p99, p999 = (
        float(np.quantile(delays, share)) if enough >= least else None for share, least in PERCENTILES.values()
    )
    return TimesRow(
        samples=len(delays),
        max_s=float(delays.max()),
        p50_s=median(delays, rng) if independent is None else Estimate(float(np.median(delays))),
        p90_s=p90,
        p99_s=p99,
        p999_s=p999,
        **more,
    )


def of_steps(results: EmulateResults, seconds: Floats) -> Floats:
    """What each complete step takes: the sum of its collectives' times; where they overlap, the longest one.

    ``seconds``: a time of each sample.
    """
    _, inverse, counts = np.unique(results.column("trial"), return_inverse=True, return_counts=True)
    found: Floats = np.zeros(len(counts))
    gather = np.maximum if results.asked.fusion else np.add  # with fusion all of a step are under way at the same time
    gather.at(found, inverse, seconds)
    return np.asarray(found[counts == len(results.plan.collectives)])


def _notes(rows: Sequence[TimesRow], overall: TimesRow, ranks: Sequence[RankRow], asked: EmulateAsked) -> list[str]:
    """Sentences below the table: what is left out, what the delays mostly are, what was not checked."""
    notes = []
    fewest = min(row.samples for row in rows)
    missing = [f"{name} needs {least}" for name, (_, least) in PERCENTILES.items() if fewest < least]
    if missing:
        notes.append(f"Left out where a size has too few samples: {', '.join(missing)}; some size has {fewest}.")
    usual, skew_s = overall.p50_s.value, overall.skew_s or 0.0
    # the root of a broadcast waits for nobody, so that its ranks' times do not tell who came late
    if asked.collective != BROADCAST and usual > 0 and skew_s > _MUCH_SKEW * usual:
        latest = max(ranks, key=lambda row: row.latest)
        notes.append(
            f"The ranks arrive {1000 * skew_s:.3g} ms apart (median), of {1000 * usual:.3g} ms in all: "
            f"most of the delay is waiting for late ranks, not transfer; rank {latest.rank} comes last most often, in "
            f"{share_text(latest.latest)}."
        )
    if overall.compressed_s is not None:
        notes.append(
            f"{asked.compression} is in its delays with all that it costs: rounding or packing on a core of each rank, "
            "its collectives, and unpacking."
        )
    if not asked.check:
        notes.append("The results of the collectives were not checked (--no-check).")
    return notes


# For a reader ------------------------------------------------------------------------------------------------------


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
