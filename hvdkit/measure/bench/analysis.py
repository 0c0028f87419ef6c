"""What the measurements mean: speed-up, efficiency, fitted laws, what costs most and what cannot be told; and drawn."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from hvdkit.common import intervals, plot
from hvdkit.common.intervals import Estimate
from hvdkit.common.json_files import Document, Part
from hvdkit.common.table import Page, Table
from hvdkit.common.units import change_text, count_text, interval_text, number_text, ranks_text, share_text
from hvdkit.errors import DataError
from hvdkit.measure.bench import laws
from hvdkit.measure.bench.results import CLOSING_LINE, STEPS, Parts, ScalingResults
from hvdkit.read.causes import Cause, by_cost, verdict
from hvdkit.read.explain.step_causes import NOTHING_FOUND

_BAD_FIT = 0.2
"""Residual, as a share of what was fitted, from which on a law is said not to describe what was measured."""
_PARTS = ("between", "input", "compute", "communication", "wait")
_SIZE = (6.0, 8.0)
_BLUE, _RED = "#0072b2", "#d55e00"


class ScalingRow(Part, frozen=True):
    """One number of ranks.

    Attributes:
        ranks: the number.
        repeats: jobs that count.
        failed: jobs that do not.
        oversubscribed: more ranks than cores.
        seconds: of a step (weak scaling) or of all the work (strong scaling), the median of the repeats; None where no
            job counts, as are the next two.
        speedup: work per second compared with the smallest number of ranks.
        efficiency: speed-up divided by how many times as many ranks there are.
        step_s, parts, causes: of the repeat with the median step; None without recorded steps.
        startup_s, first_step_s: medians of the repeats; None without recorded steps.
    """

    ranks: int
    repeats: int
    failed: int
    oversubscribed: bool
    seconds: Estimate | None = None
    speedup: Estimate | None = None
    efficiency: Estimate | None = None
    step_s: float | None = None
    startup_s: float | None = None
    first_step_s: float | None = None
    parts: Parts | None = None
    causes: tuple[Cause, ...] | None = None


class ScalingSummary(Document, frozen=True):
    """What follows from the results.

    Attributes:
        mode: "strong" or "weak".
        measure: what was compared, ``results.STEPS`` or ``results.CLOSING_LINE``; "" when there is nothing.
        rows: by number of ranks.
        fits: the laws, without oversubscribed points.
        notes: full sentences: what a reader should know.
        confidence: of the intervals.
        causes: what costs the steps of the largest job time.
    """

    kind = "bench-summary"
    schema = 4
    written_by = "hvdkit bench show --json"

    mode: str
    measure: str
    rows: tuple[ScalingRow, ...]
    fits: tuple[laws.Fit, ...]
    notes: tuple[str, ...]
    confidence: float = intervals.CONFIDENCE
    causes: tuple[Cause, ...] = ()


def analyse(results: ScalingResults) -> ScalingSummary:
    """Everything that follows from the results so far; the intervals are the same for the same results."""
    rng = np.random.default_rng(0)
    samples = results.samples()
    crowded = {launch.ranks for launch in results.launches if launch.oversubscribed}
    rows = tuple(_row(results, n, samples, rng, oversubscribed=n in crowded) for n in results.asked.ranks)
    fitted = {n: seconds for n, seconds in samples.items() if n not in crowded}
    fits = tuple(laws.fits(results.asked.mode, fitted, rng))
    notes = (
        *results.notes,
        *_notes_of_jobs(results, samples),
        *_notes_of_noise(results, samples, rng),
        *_notes_of_models(fits),
    )
    found = tuple(by_cost(causes(rows)))
    return ScalingSummary(results.asked.mode, results.measure, rows, fits, notes, causes=found)


def _row(
    results: ScalingResults, n: int, samples: dict[int, list[float]], rng: np.random.Generator, *, oversubscribed: bool
) -> ScalingRow:
    """One number of ranks, of the seconds of all: ``samples``, by number of ranks."""
    counted = [job for job in results.counted() if job.ranks == n]
    failed = sum(job.ranks == n and job.failure is not None for job in results.jobs)
    row = ScalingRow(n, len(counted), failed, oversubscribed)
    if n not in samples:
        return row
    base = min(samples)
    more = n / base if results.asked.mode == "weak" else 1.0
    speedup = Estimate(1.0, 1.0, 1.0) if n == base else intervals.ratio(samples[base], samples[n], rng, more)
    row = replace(row, seconds=intervals.median(samples[n], rng), speedup=speedup, efficiency=speedup.scaled(base / n))
    if results.measure != STEPS:
        return row
    steps = sorted((job.steps for job in counted if job.steps is not None), key=lambda steps: steps.step_s)
    middle = steps[(len(steps) - 1) // 2]
    return replace(
        row,
        step_s=middle.step_s,
        startup_s=statistics.median(one.startup_s for one in steps),
        first_step_s=statistics.median(one.first_step_s for one in steps),
        parts=middle.parts,
        causes=middle.causes,
    )


def _notes_of_jobs(results: ScalingResults, samples: dict[int, list[float]]) -> Iterator[str]:
    """Which jobs are left out, and what speed-ups are compared with where that is not one rank."""
    for job in results.jobs:
        if job.failure is not None:
            yield f"Repeat {job.repeat + 1} on {ranks_text(job.ranks)} failed and is left out: it {job.failure}"
    if samples and min(samples) > 1:
        base = min(samples)
        why = "no job counts on fewer" if results.asked.ranks[0] < base else "the fewest that were asked for"
        yield f"Speed-up and efficiency are compared with {base} ranks, not with one: {why}."
    left = len(results.counted()) - sum(map(len, samples.values()))
    if left and results.measure == CLOSING_LINE:
        jobs = f"{count_text(left, 'job')} recorded {'its' if left == 1 else 'their'} steps and"
        yield (
            f"{jobs} printed no closing line, and cannot be compared with the others, which recorded none: have every "
            "rank record its steps at every number of ranks."
        )


def _notes_of_noise(
    results: ScalingResults, samples: dict[int, list[float]], rng: np.random.Generator
) -> Iterator[str]:
    """What the repeats cannot tell: more ranks than cores, too few repeats, numbers of ranks that overlap."""
    crowded = [str(launch.ranks) for launch in results.launches if launch.oversubscribed]
    if crowded:
        yield (
            f"More ranks than the {results.environment.cores} usable cores (*): {', '.join(crowded)}; how the ranks "
            "contend for cores is what is measured there, so no law is fitted to these points."
        )
    ranks = sorted(samples)
    least = min(map(len, samples.values()), default=0)
    alone = [str(n) for n in ranks if len(samples[n]) == 1]
    if alone and len(alone) == len(ranks):
        yield "One repeat says nothing about noise: there are no intervals; give --repeats 5 or more."
    elif alone:
        yield (
            f"One repeat alone counts at N = {', '.join(alone)}, which says nothing about noise: what is made of it "
            "has no interval; give --repeats 5 or more."
        )
    elif 1 < least < intervals.ENOUGH_REPEATS:
        yield (
            f"With {least} repeats the interval of a median is their range at most, which holds the median of many in "
            f"{share_text(1 - 2 ** (1 - least))} of cases, not 95%; give --repeats {intervals.ENOUGH_REPEATS} or more."
        )
    for fewer, more in itertools.pairwise(ranks):
        work = more / fewer if results.asked.mode == "weak" else 1.0
        gain = intervals.ratio(samples[fewer], samples[more], rng, work)
        if gain.low is not None and gain.high is not None and gain.low <= 1 <= gain.high:
            yield (
                f"Noise: cannot tell {fewer} from {more} ranks apart; the speed-up from one to the other is "
                f"{gain.value:.2f}, interval {gain.low:.2f} to {gain.high:.2f}. More repeats may tell."
            )


def _notes_of_models(fits: Sequence[laws.Fit]) -> Iterator[str]:
    """Laws that do not describe what was measured, or cannot be tested."""
    for fit in fits:
        ranks, worst = max(fit.residuals.items(), key=lambda item: abs(item[1]))
        if abs(worst) > _BAD_FIT:
            yield (
                f"{fit.name} does not describe this: on {ranks_text(ranks)} it is {share_text(abs(worst))} off what "
                "was measured, so that its parameters mean nothing."
            )
    exact = [fit.name for fit in fits if fit.exact]
    if exact:
        yield (
            f"{' and '.join(exact)}: as many parameters as points, so that the fit passes through them whatever the "
            "truth is; measure at more numbers of ranks to test it."
        )


def causes(rows: Sequence[ScalingRow]) -> list[Cause]:
    """What costs the largest job time, of which that is known."""
    return next((list(row.causes) for row in reversed(rows) if row.causes is not None), [])


def otherwise(analysis: ScalingSummary) -> str:
    """The verdict where no cause is worth a sentence."""
    if analysis.measure != STEPS:
        return (
            "It cannot tell where a step goes: record the steps (hk.record_steps(loader), hk.RecordSteps()), or see "
            "one job with hvdkit launch --explain-job."
        )
    if not any(row.causes is not None for row in analysis.rows):
        return "It cannot tell which rank is late: there are no ten steps of several ranks."
    return NOTHING_FOUND


# For a reader ------------------------------------------------------------------------------------------------------


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


def draw(analysis: ScalingSummary, path: Path, source: Path) -> None:
    """Draw speed-up and efficiency with their intervals and the ideal to a file (see ``plot.write``).

    Raises:
        DataError: nothing was measured, or the file cannot be written.
        InvalidArgumentError: another ending; said before what is in the results.
    """
    plot.check(path)
    rows = [row for row in analysis.rows if row.speedup is not None]
    if not rows:
        raise DataError("nothing can be drawn: no job counts; measure with `hvdkit bench scaling` first.")
    draws = [lambda axes: speedup(axes, rows), lambda axes: efficiency(axes, rows)]
    plot.write(path, *draws, size=_SIZE, sources=[source])


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
