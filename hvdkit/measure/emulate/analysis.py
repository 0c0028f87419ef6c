"""What the measurements mean: times by size, bandwidth, skew apart from transfer, ranks, outliers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.common.allreduce import bus_factor
from hvdkit.common.intervals import CONFIDENCE, Estimate, median
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import share_text
from hvdkit.errors import DataError
from hvdkit.measure.emulate.check import ALLREDUCE, REDUCE_SCATTER
from hvdkit.measure.emulate.results import EmulateAsked, EmulateResults
from hvdkit.observe.lateness import Floats

PERCENTILES = {"p90": (0.9, 10), "p99": (0.99, 100), "p99.9": (0.999, 1000)}
"""The share, and how many samples it needs: as many as make one beyond it likely. With fewer it is the maximum."""
ENOUGH_FOR_OUTLIERS = 8
FENCE = 3.0
RULE = (
    f"longer than the upper quartile of its size plus {FENCE:g} times the distance of the quartiles (Tukey: far out), "
    f"from {ENOUGH_FOR_OUTLIERS} samples of a size on"
)
STEP_IN_TURN = "the sum of its collectives' delays"
STEP_OVERLAPS = "the longest of its collectives' delays, which overlap"
_MUCH_SKEW = 0.5
"""Share of the median delay from which on the wait for late ranks is said aloud."""


class TimesRow(Part, frozen=True, kw_only=True, rename={"nbytes": "size", "dtype": "type"}):
    """The delays of one size, of all sizes, or of whole steps; a delay is the longest of the ranks' own times.

    Attributes:
        nbytes: the size; None for all together, where sizes are mixed.
        count, dtype: elements and their type; None for all together, or where one size has several types.
        per_step: collectives of this size in a step.
        samples: how many delays.
        mean_s, max_s: of them.
        p50_s: their median, with its interval.
        p90_s, p99_s, p999_s: percentiles, by linear interpolation; None with fewer than 10, 100, 1000 samples.
        skew_s: median, from the first rank's arrival to the last one's; None for whole steps, as are the next three.
        transfer_s: median, from the last rank's arrival until the last rank is done.
        algbw_bytes_per_s, busbw_bytes_per_s: of the median transfer (all together: all bytes by all transfers, or by
            those of whole steps where they overlap); None where that is 0.
        redop: the operation, as nccl-tests names it: "sum" or "none".
        wrong: elements that were not what they must be; None where they were not checked.
    """

    nbytes: int | None = None
    count: int | None = None
    dtype: str | None = None
    per_step: int
    samples: int
    mean_s: float
    max_s: float
    p50_s: Estimate
    p90_s: float | None
    p99_s: float | None
    p999_s: float | None
    skew_s: float | None = None
    transfer_s: Estimate | None = None
    algbw_bytes_per_s: Estimate | None = None
    busbw_bytes_per_s: Estimate | None = None
    redop: str
    wrong: int | None


class RankRow(Part, frozen=True):
    """One rank.

    Attributes:
        rank: its number.
        p50_s, max_s: of its own times, from its arrival until it is done.
        slowest, latest: share of the collectives in which its own time was the longest, the shortest. Where ranks leave
            a collective together, the one with the shortest time is the one that came last.
    """

    rank: int
    p50_s: Estimate
    max_s: float
    slowest: float
    latest: float


class Outlier(Part, frozen=True, rename={"nbytes": "size"}):
    """A collective that took much longer than others of its size (Tukey: far out).

    Attributes:
        trial, index, name, nbytes: which.
        slowest_s, skew_s, transfer_s: its times.
        slowest_rank: whose own time was the longest.
        latest_rank: whose own time was the shortest, where most of the delay is skew: it came last.
        times_median: its delay divided by the median of its size; None where that is 0.
    """

    trial: int
    index: int
    name: str
    nbytes: int
    slowest_s: float
    skew_s: float
    transfer_s: float
    slowest_rank: int
    latest_rank: int | None
    times_median: float | None


class EmulateSummary(Document, frozen=True, rename={"factor": "busbw_factor"}):
    """What follows from the samples.

    Attributes:
        asked: engine, collective, algorithm, ranks, hosts, ...
        factor: busbw / algbw of this collective on so many ranks.
        trials: steps that were measured, the last one perhaps in part.
        rows: by size, the smallest first.
        overall: all sizes together.
        step: what a complete step takes, see ``of_steps``; None without one.
        step_is: in words, how that follows from its collectives.
        ranks: by number.
        cdf_band: half the height of the band around the distribution of all delays, see ``distribution``.
        outliers: the longest first.
        notes: full sentences: what a reader should know.
        confidence: of the intervals.
    """

    kind = "emulate-summary"
    schema = 3
    written_by = "hvdkit emulate show --json"

    asked: EmulateAsked
    factor: float
    trials: int
    rows: tuple[TimesRow, ...]
    overall: TimesRow
    step: TimesRow | None
    step_is: str
    ranks: tuple[RankRow, ...]
    cdf_band: float
    outliers: tuple[Outlier, ...]
    notes: tuple[str, ...]
    confidence: float = CONFIDENCE


def analyse(results: EmulateResults) -> EmulateSummary:
    """Everything that follows from the samples; the intervals are the same for the same samples.

    Raises:
        DataError: there is no sample.
        InvalidArgumentError: an unknown collective.
    """
    samples, asked = results.samples, results.asked
    if not samples:
        raise DataError("Nothing was measured: there is no sample to analyse; run more trials.")
    rng = np.random.default_rng(0)
    sizes = np.unique(results.column("nbytes")).tolist()
    rows = tuple(_row_of(results, size, rng) for size in sizes)
    overall = _row_of(results, None, rng)
    steps = of_steps(results, results.column("slowest_s"))
    own = np.array([one.ranks_s for one in samples], dtype=float)
    slowest, latest = Counter(one.slowest_rank for one in samples), Counter(own.argmin(axis=1).tolist())
    ranks = tuple(
        RankRow(rank, median(one, rng), float(one.max()), slowest[rank] / len(samples), latest[rank] / len(samples))
        for rank, one in enumerate(own.T)
    )
    return EmulateSummary(
        asked=asked,
        factor=bus_factor(asked.collective, asked.ranks),
        trials=len({one.trial for one in samples}),
        rows=rows,
        overall=overall,
        step=_times_row(results, steps, rng, per_step=1) if len(steps) else None,
        step_is=STEP_OVERLAPS if asked.fusion else STEP_IN_TURN,
        ranks=ranks,
        cdf_band=band(len(steps) if asked.fusion else len(samples)),
        outliers=tuple(sorted(_outliers(results, sizes), key=lambda one: -one.slowest_s)),
        notes=(*map(str, results.notes), *_notes(rows, overall, ranks, checked=asked.check)),
    )


def band(independent: int) -> float:
    """Half the height of a band that holds the true distribution everywhere at once with 95 % probability.

    Args:
        independent: samples that tell something new; at least 1 is supposed.
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
        results,
        results.column("slowest_s")[keep],
        rng,
        None if steps is None else len(steps),
        nbytes=size,
        count=count,
        dtype=dtype,
        per_step=len(collectives),
        skew_s=float(np.median(results.column("skew_s")[keep])),
        transfer_s=transfer,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if algbw is None else algbw.scaled(bus_factor(asked.collective, asked.ranks)),
    )


def _times_row(
    results: EmulateResults, delays: Floats, rng: np.random.Generator, independent: int | None = None, **more: Any
) -> TimesRow:
    """A row of delays, at least one.

    Args:
        results: that they are of.
        delays: in seconds.
        rng: for the interval of the median.
        independent: how many of them tell something new, where others repeat them; then there is no interval.
        more: further fields.
    """
    enough = len(delays) if independent is None else independent
    p90, p99, p999 = (
        float(np.quantile(delays, share)) if enough >= least else None for share, least in PERCENTILES.values()
    )
    return TimesRow(
        samples=len(delays),
        mean_s=float(delays.mean()),
        max_s=float(delays.max()),
        p50_s=median(delays, rng) if independent is None else Estimate(float(np.median(delays))),
        p90_s=p90,
        p99_s=p99,
        p999_s=p999,
        redop="sum" if results.asked.collective in (ALLREDUCE, REDUCE_SCATTER) else "none",
        wrong=0 if results.asked.check else None,
        **more,
    )


def of_steps(results: EmulateResults, seconds: Floats) -> Floats:
    """What a complete step takes: the sum of its collectives' times; where they overlap, the longest one.

    Args:
        results: with the samples.
        seconds: a time of each sample.
    Returns:
        One time for each step of which every collective was measured.
    """
    _, inverse, counts = np.unique(results.column("trial"), return_inverse=True, return_counts=True)
    found: Floats = np.zeros(len(counts))
    if results.asked.fusion:  # all collectives of a step are under way at the same time
        np.maximum.at(found, inverse, seconds)
    else:
        np.add.at(found, inverse, seconds)
    return np.asarray(found[counts == len(results.plan.collectives)])


def fence(values: Floats) -> float:
    """Above it a time is an outlier: the upper quartile plus three times the distance of the quartiles.

    Returns:
        Seconds; infinity with fewer than ``ENOUGH_FOR_OUTLIERS`` samples.
    Source: J. W. Tukey, Exploratory Data Analysis (1977), chapter 2: "far out".
    """
    if len(values) < ENOUGH_FOR_OUTLIERS:
        return math.inf
    lower, upper = np.quantile(values, [0.25, 0.75])
    return float(upper + FENCE * (upper - lower))


def _outliers(results: EmulateResults, sizes: Sequence[int]) -> list[Outlier]:
    """The collectives that ``RULE`` names, size by size."""
    found = []
    all_sizes, all_delays = results.column("nbytes"), results.column("slowest_s")
    for size in sizes:
        rows = np.flatnonzero(all_sizes == size)
        delays = all_delays[rows]
        usual = float(np.median(delays))
        for row in rows[delays > fence(delays)].tolist():
            one = results.samples[row]
            late = len(one.ranks_s) > 1 and one.skew_s > one.slowest_s / 2
            found.append(
                Outlier(
                    trial=one.trial,
                    index=one.index,
                    name=results.plan.collectives[one.index].name,
                    nbytes=one.nbytes,
                    slowest_s=one.slowest_s,
                    skew_s=one.skew_s,
                    transfer_s=one.transfer_s,
                    slowest_rank=one.slowest_rank,
                    latest_rank=int(np.argmin(one.ranks_s)) if late else None,
                    times_median=one.slowest_s / usual if usual > 0 else None,
                )
            )
    return found


def _notes(rows: Sequence[TimesRow], overall: TimesRow, ranks: Sequence[RankRow], *, checked: bool) -> list[str]:
    """Sentences below the table: what is left out, what the delays mostly are, what was not checked."""
    notes = []
    fewest = min(row.samples for row in rows)
    missing = [f"{name} needs {least}" for name, (_, least) in PERCENTILES.items() if fewest < least]
    if missing:
        notes.append(f"Left out where a size has too few samples: {', '.join(missing)}; some size has {fewest}.")
    if fewest < ENOUGH_FOR_OUTLIERS:
        notes.append(f"No outlier is looked for among fewer than {ENOUGH_FOR_OUTLIERS} samples of a size.")
    usual, skew_s = overall.p50_s.value, overall.skew_s or 0.0
    if usual > 0 and skew_s > _MUCH_SKEW * usual:
        latest = max(ranks, key=lambda one: one.latest)
        notes.append(
            f"The ranks arrive {1000 * skew_s:.3g} ms apart (median), of {1000 * usual:.3g} ms in all: "
            f"most of the delay is waiting for late ranks, not transfer; rank {latest.rank} comes last most often, in "
            f"{share_text(latest.latest)}."
        )
    if not checked:
        notes.append("The results of the collectives were not checked (--no-check).")
    return notes
