"""What the measurements mean: speed-up, efficiency, fitted laws, what costs most, and what cannot be told."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from hvdkit.common import intervals
from hvdkit.common.intervals import Estimate
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import count_text, ranks_text, share_text
from hvdkit.measure.bench import laws
from hvdkit.measure.bench.measurement import Parts
from hvdkit.measure.bench.results import CLOSING_LINE, STEPS, ScalingResults
from hvdkit.read.causes import Cause, by_cost
from hvdkit.read.explain.step_causes import NOTHING_FOUND

_BAD_FIT = 0.2
"""Residual, as a share of what was fitted, from which on a law is said not to describe what was measured."""


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
    row = replace(
        row,
        seconds=intervals.median(samples[n], rng),
        speedup=speedup,
        efficiency=speedup.scaled(base / n),
    )
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
