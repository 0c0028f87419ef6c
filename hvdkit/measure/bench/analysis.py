"""What the measurements mean: speed-up, efficiency, fitted laws, and what cannot be told."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from hvdkit.common import intervals
from hvdkit.common.causes import WORTH_SAYING, Cause, dearest_first
from hvdkit.common.intervals import Estimate
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import change_text, count_text, duration_text, ranks_text, share_text
from hvdkit.measure.bench import laws
from hvdkit.measure.bench.accounting import TOLERANCE, Accounting
from hvdkit.measure.bench.measurement import Late, Parts, Slowest
from hvdkit.measure.bench.results import CLOSING_LINE, STEPS, MeasuredJob, ScalingResults
from hvdkit.steps.ranks import name_ranks

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
        step_s, parts, slowest, late: of the repeat with the median step; None without recorded steps.
        startup_s, first_step_s: medians of the repeats; None without recorded steps.
        recorded: of one more job, with a timeline; None without it.
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
    slowest: Slowest | None = None
    late: Late | None = None
    recorded: Accounting | None = None


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
    schema = 2
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
    rng = np.random.default_rng(results.asked.seed)
    samples = results.samples()
    crowded = {launch.ranks for launch in results.launches if launch.oversubscribed}
    rows = tuple(_row(results, n, samples, n in crowded, rng) for n in results.asked.ranks)
    fitted = {n: seconds for n, seconds in samples.items() if n not in crowded}
    fits = tuple(laws.fits(results.asked.mode, fitted, rng))
    notes = [
        *results.notes,
        *_notes_of_failures(results),
        *_notes_of_base(results, samples),
        *_notes_of_crowding(rows, results.environment.cores),
        *_notes_of_noise(results.asked.mode, samples, rng),
        *_notes_of_fits(fits),
        *_notes_of_sums(rows),
        *_notes_of_recordings(results, rows),
    ]
    found = tuple(dearest_first(causes(rows)))
    return ScalingSummary(results.asked.mode, results.measure, rows, fits, tuple(notes), causes=found)


def _row(
    results: ScalingResults, n: int, samples: dict[int, list[float]], crowded: bool, rng: np.random.Generator
) -> ScalingRow:
    counted = [job for job in results.counted() if job.ranks == n]
    failed = sum(job.ranks == n and job.failure is not None for job in results.jobs)
    recorded = next((one.accounting for one in results.recordings if one.ranks == n), None)
    row = ScalingRow(n, len(counted), failed, crowded, recorded=recorded)
    if n not in samples:
        return row
    base = min(samples)
    more = n / base if results.asked.mode == "weak" else 1.0
    speedup = Estimate(1.0, 1.0, 1.0) if n == base else intervals.ratio(samples[base], samples[n], rng, more)
    return replace(
        row,
        seconds=intervals.median(samples[n], rng),
        speedup=speedup,
        efficiency=speedup.scaled(base / n),
        **(_of_steps(counted) if results.measure == STEPS else {}),
    )


def _of_steps(counted: Sequence[MeasuredJob]) -> dict[str, Any]:
    steps = sorted((job.steps for job in counted if job.steps is not None), key=lambda steps: steps.step_s)
    middle = steps[(len(steps) - 1) // 2]
    return {
        "step_s": middle.step_s,
        "startup_s": statistics.median(one.startup_s for one in steps),
        "first_step_s": statistics.median(one.first_step_s for one in steps),
        "parts": middle.parts,
        "slowest": middle.slowest,
        "late": middle.late,
    }


def _notes_of_failures(results: ScalingResults) -> list[str]:
    return [
        f"Repeat {job.repeat + 1} on {ranks_text(job.ranks)} failed and is left out: it {job.failure}"
        for job in results.jobs
        if job.failure is not None
    ]


def _notes_of_base(results: ScalingResults, samples: dict[int, list[float]]) -> list[str]:
    """What speed-ups are compared with where that is not one rank, and which jobs are compared with nothing."""
    notes = []
    if samples and min(samples) > 1:
        base = min(samples)
        why = "no job counts on fewer" if results.asked.ranks[0] < base else "the fewest that were asked for"
        notes.append(f"Speed-up and efficiency are compared with {base} ranks, not with one: {why}.")
    left = len(results.counted()) - sum(map(len, samples.values()))
    if left and results.measure == CLOSING_LINE:
        jobs = f"{count_text(left, 'job')} recorded {'its' if left == 1 else 'their'} steps and"
        notes.append(
            f"{jobs} printed no closing line, and cannot be compared with the others, which recorded none: have every "
            "rank record its steps at every number of ranks."
        )
    return notes


def _notes_of_crowding(rows: Sequence[ScalingRow], cores: int) -> list[str]:
    crowded = [str(row.ranks) for row in rows if row.oversubscribed]
    if not crowded:
        return []
    return [
        f"More ranks than the {cores} usable cores (*): {', '.join(crowded)}; how the ranks contend for cores is what "
        "is measured there, so no law is fitted to these points."
    ]


def _notes_of_noise(mode: str, samples: dict[int, list[float]], rng: np.random.Generator) -> list[str]:
    """Sentences on what the repeats cannot tell: too few of them, numbers of ranks that overlap.

    ``samples``: seconds by ranks.
    """
    notes = []
    ranks = sorted(samples)
    least = min(map(len, samples.values()), default=0)
    alone = [str(n) for n in ranks if len(samples[n]) == 1]
    if alone and len(alone) == len(ranks):
        notes.append("One repeat says nothing about noise: there are no intervals; give --repeats 5 or more.")
    elif alone:
        notes.append(
            f"One repeat alone counts at N = {', '.join(alone)}, which says nothing about noise: what is made of it "
            "has no interval; give --repeats 5 or more."
        )
    elif 1 < least < intervals.ENOUGH_REPEATS:
        share = 1 - 2 ** (1 - least)
        notes.append(
            f"With {least} repeats the interval of a median is their range at most, which holds the median of many in "
            f"{share_text(share)} of cases, not 95%; give --repeats {intervals.ENOUGH_REPEATS} or more."
        )
    for fewer, more in itertools.pairwise(ranks):
        gain = intervals.ratio(samples[fewer], samples[more], rng, more / fewer if mode == "weak" else 1.0)
        if gain.low is not None and gain.high is not None and gain.low <= 1 <= gain.high:
            notes.append(
                f"Noise: cannot tell {fewer} from {more} ranks apart; the speed-up from one to the other is "
                f"{gain.value:.2f}, interval {gain.low:.2f} to {gain.high:.2f}. More repeats may tell."
            )
    return notes


def _notes_of_fits(fits: Sequence[laws.Fit]) -> list[str]:
    notes = []
    for fit in fits:
        ranks, worst = max(fit.residuals.items(), key=lambda item: abs(item[1]))
        if abs(worst) > _BAD_FIT:
            notes.append(
                f"{fit.name} does not describe this: on {ranks_text(ranks)} it is {share_text(abs(worst))} off what "
                "was measured, so that its parameters mean nothing."
            )
    exact = [fit.name for fit in fits if fit.exact]
    if not exact:
        return notes
    return [
        *notes,
        f"{' and '.join(exact)}: as many parameters as points, so that the fit passes through them whatever the truth "
        "is; measure at more numbers of ranks to test it.",
    ]


def causes(rows: Sequence[ScalingRow]) -> list[Cause]:
    """What the ranks of the largest job lose by waiting for one another."""
    found = [(row.ranks, row.late, row.step_s) for row in rows if row.late is not None and row.step_s]
    if not found:
        return []
    size, late, step_s = found[-1]
    evidence = f"steps on {size} ranks, more than the typical rank: input {duration_text(1e6 * late.input_s)}"
    if late.compute_s is not None:
        evidence += f", computation {duration_text(1e6 * late.compute_s)}"
    if late.ranks:
        names = name_ranks(late.ranks)
        comes = f"{names.capitalize()} {'come' if len(late.ranks) > 1 else 'comes'} late, and the others wait"
        kind, what = "compute", f"{comes}: the computation takes longer."
        advice = f"Look at the batches, the cores and the clock of {names} (hvdkit doctor --job)."
        if late.input_s >= (late.compute_s or 0.0):
            kind, what = "input", f"{comes}: for the input."
            advice = f"Speed up the input of {names}: more workers, prefetching, a local copy of its data."
    else:
        kind, what = "random-late", "A different rank is late in each step."
        evidence = f"steps on {size} ranks"
        advice = "Even out what a step has to do (batches of unequal length), and give each rank cores of its own."
    return [Cause(kind, late.lost_s, late.lost_s / step_s, what, evidence, advice, ranks=late.ranks)]


def otherwise(analysis: ScalingSummary) -> str:
    """The verdict where no cause is worth a sentence."""
    if analysis.measure != STEPS:
        return (
            "It cannot tell where a step goes: record the steps (hk.record_steps(loader), hk.RecordSteps()), or see "
            "one job with hvdkit launch --explain-job."
        )
    if not any(row.late is not None for row in analysis.rows):
        return "It cannot tell which rank is late: there are no steps of several ranks."
    return f"No rank keeps the others waiting for {share_text(WORTH_SAYING)} of a step or more."


def _notes_of_sums(rows: Sequence[ScalingRow]) -> list[str]:
    notes = []
    for row in rows:
        if row.parts is None or row.step_s is None:
            continue
        parts = row.parts
        off = (parts.input + parts.compute + (parts.communication or 0.0) + parts.wait) / row.step_s - 1
        if abs(off) > TOLERANCE:
            notes.append(
                f"On {ranks_text(row.ranks)} the parts of a step do not add up to it: their sum is {change_text(off)} "
                "off, so that at least one of them is wrong."
            )
    return notes


def _notes_of_recordings(results: ScalingResults, rows: Sequence[ScalingRow]) -> list[str]:
    notes = [
        f"The job with a timeline on {ranks_text(one.ranks)} is left out: it {one.failure}"
        for one in results.recordings
        if one.failure is not None
    ]
    for row in rows:
        found = row.recorded
        if found is None or row.step_s is None:
            continue
        notes.append(
            f"On {ranks_text(row.ranks)} the one job with a timeline took {1000 * found.step_s:.3g} ms a step on rank "
            f"0, the measured ones {1000 * row.step_s:.3g} ms: take its shares, not its times. It enters no other "
            "number."
        )
        if abs(found.off) > TOLERANCE:
            notes.append(_doubt(row.ranks, found))
    return notes


def _doubt(ranks: int, found: Accounting) -> str:
    said = f"On {ranks_text(ranks)} the parts by the timeline do not add up: {1000 * found.sum_s:.3g} ms"
    timeline = "" if found.timeline_step_s is None else f", by the timeline alone {1000 * found.timeline_step_s:.3g} ms"
    return (
        f"{said}, where a step took {1000 * found.step_s:.3g} ms by its own record{timeline}; more than "
        f"{share_text(TOLERANCE)} apart (several recorded steps to one exchange, as with backward_passes_per_step, or "
        "a machine that was not quiet)."
    )
