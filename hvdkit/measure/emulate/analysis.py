"""What the measurements mean: times by size, bandwidth, skew apart from transfer, ranks, outliers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.intervals import CONFIDENCE, Estimate
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import share_text
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.measure.emulate import spread
from hvdkit.measure.emulate.check import ALLREDUCE, REDUCE_SCATTER
from hvdkit.measure.emulate.results import EmulateResults, Sample
from hvdkit.measure.emulate.run_job import EmulateAsked
from hvdkit.measure.emulate.spread import EmpiricalDistribution, Floats, Times

RULE = (
    f"longer than the upper quartile of its size plus {spread.FENCE:g} times the distance of the quartiles (Tukey: far "
    f"out), from {spread.ENOUGH_FOR_OUTLIERS} samples of a size on"
)
STEP_IN_TURN = "the sum of its collectives' delays"
STEP_OVERLAPS = "the longest of its collectives' delays, which overlap"
_MUCH_SKEW = 0.5
"""Share of the median delay from which on the wait for late ranks is said aloud."""
Columns = Mapping[str, NDArray[Any]]
"""Fields of the samples, in their order."""
_IN_SECONDS = {"slowest": "slowest_s", "skew": "skew_s", "transfer": "transfer_s"}


class SizeRow(
    Part,
    frozen=True,
    kw_only=True,
    rename={
        "nbytes": "size",
        "dtype": "type",
        "algbw": "algbw_bytes_per_s",
        "busbw": "busbw_bytes_per_s",
        **_IN_SECONDS,
    },
):
    """One size, or all of them.

    Attributes:
        nbytes: the size; None for all together, where sizes are mixed.
        count, dtype: elements and their type; None for all together, or where one size has several types.
        per_step: collectives of this size in a step.
        slowest: of each collective, the longest of its ranks' own times: the delay that the job sees.
        skew: from the first rank's arrival to the last one's.
        transfer: from the last rank's arrival until the last rank is done.
        algbw, busbw: bytes per second, of the median transfer (all together: all bytes by all transfers, or by
            those of whole steps where they overlap); None where that is 0.
        redop: the operation, as nccl-tests names it: "sum" or "none".
        wrong: elements that were not what they must be; None where they were not checked.
    """

    nbytes: int | None = None
    count: int | None = None
    dtype: str | None = None
    per_step: int
    slowest: Times
    skew: Times
    transfer: Times
    algbw: Estimate | None
    busbw: Estimate | None
    redop: str
    wrong: int | None


class RankRow(Part, frozen=True, rename={"own": "own_s"}):
    """One rank.

    Attributes:
        rank: its number.
        own: its own times, from its arrival until it is done.
        slowest, latest: share of the collectives in which its own time was the longest, the shortest. Where ranks leave
            a collective together, the one with the shortest time is the one that came last.
    """

    rank: int
    own: Times
    slowest: float
    latest: float


class Outlier(Part, frozen=True, rename={"nbytes": "size"}):
    """A collective that took much longer than others of its size: see ``RULE``.

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


class EmulateSummary(Document, frozen=True, rename={"factor": "busbw_factor", "step": "step_s"}):
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
        cdf_band: half the height of the band around the distribution of all delays, see ``cdf``.
        outliers: the longest first.
        notes: full sentences: what a reader should know.
        outlier_rule: from when on a collective is one.
        confidence: of the intervals.
    """

    kind = "emulate-summary"
    written_by = "hvdkit emulate show --json"

    asked: EmulateAsked
    factor: float
    trials: int
    rows: tuple[SizeRow, ...]
    overall: SizeRow
    step: Times | None
    step_is: str
    ranks: tuple[RankRow, ...]
    cdf_band: float
    outliers: tuple[Outlier, ...]
    notes: tuple[str, ...]
    outlier_rule: str = RULE
    confidence: float = CONFIDENCE


def bus_factor(collective: str, ranks: int) -> float:
    """busbw / algbw: how much each link carries per byte of the collective, so that busbw is the same for any n.

    Args:
        collective: "allreduce", "reduce_scatter+all_gather" (an allreduce), "reduce_scatter", "all_gather",
            "all_to_all", "broadcast" or "reduce"; other spellings with and without _ and - are understood.
        ranks: n, >= 1.
    Returns:
        2 (n - 1) / n for an allreduce, (n - 1) / n where each rank keeps its own part, 1 for broadcast and reduce.
    Raises:
        InvalidArgumentError: another collective, or fewer ranks than one.
    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if ranks < 1:
        raise InvalidArgumentError(f"There are {ranks} ranks; expected at least 1.")
    name = "".join(letter for letter in collective.lower() if letter.isalpha())
    others = (ranks - 1) / ranks
    factors = {
        "allreduce": 2 * others,
        "reducescatterallgather": 2 * others,
        "reducescatter": others,
        "allgather": others,
        "alltoall": others,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    if name not in factors:
        raise InvalidArgumentError(f"The collective is {collective!r}; expected one of {', '.join(factors)}.")
    return factors[name]


def analyse(results: EmulateResults) -> EmulateSummary:
    """Everything that follows from the samples; the intervals are the same for the same samples.

    Raises:
        DataError: there is no sample.
        InvalidArgumentError: an unknown collective.
    """
    samples = results.samples
    if not samples:
        raise DataError("Nothing was measured: there is no sample to analyse; run more trials.")
    rng = np.random.default_rng(0)
    columns = {name: results.column(name) for name in ("nbytes", *_IN_SECONDS.values())}
    rows = tuple(_row(results, columns, size, rng) for size in np.unique(columns["nbytes"]).tolist())
    overall = _row(results, columns, None, rng)
    ranks = _ranks(samples, rng)
    steps = of_steps(results, columns["slowest_s"])
    return EmulateSummary(
        asked=results.asked,
        factor=bus_factor(results.asked.collective, results.asked.ranks),
        trials=len({one.trial for one in samples}),
        rows=rows,
        overall=overall,
        step=spread.times(steps, rng) if len(steps) else None,
        step_is=STEP_OVERLAPS if results.asked.fusion else STEP_IN_TURN,
        ranks=ranks,
        cdf_band=cdf(results).band,
        outliers=_outliers(results, columns),
        notes=(*map(str, results.notes), *_notes(rows, overall, ranks, results)),
    )


def cdf(results: EmulateResults) -> EmpiricalDistribution:
    """The distribution of the delays, all sizes together."""
    slowest = results.column("slowest_s")
    return spread.distribution(slowest, len(of_steps(results, slowest)) if results.asked.fusion else None)


def _row(results: EmulateResults, columns: Columns, size: int | None, rng: np.random.Generator) -> SizeRow:
    """The samples of one size; None for all together."""
    asked = results.asked
    collectives = [one for one in results.plan.collectives if size in (None, one.nbytes)]
    kinds = {(one.elements, one.dtype) for one in collectives}
    count, dtype = next(iter(kinds)) if size is not None and len(kinds) == 1 else (None, None)
    keep = slice(None) if size is None else columns["nbytes"] == size
    steps = of_steps(results, columns["transfer_s"]) if size is None and asked.fusion else None
    slowest, skew, transfer = (
        spread.times(columns[name][keep], rng, None if steps is None else len(steps)) for name in _IN_SECONDS.values()
    )
    if size is not None:
        algbw = _rate(size, transfer.p50)
    elif steps is not None:
        algbw = _rate(len(steps) * results.plan.nbytes, Estimate(float(steps.sum())))
    else:
        algbw = _rate(int(columns["nbytes"].sum()), Estimate(float(columns["transfer_s"].sum())))
    return SizeRow(
        nbytes=size,
        count=count,
        dtype=dtype,
        per_step=len(collectives),
        slowest=slowest,
        skew=skew,
        transfer=transfer,
        algbw=algbw,
        busbw=None if algbw is None else algbw.scaled(bus_factor(asked.collective, asked.ranks)),
        redop="sum" if asked.collective in (ALLREDUCE, REDUCE_SCATTER) else "none",
        wrong=0 if asked.check else None,
    )


def _rate(nbytes: int, seconds: Estimate) -> Estimate | None:
    """Bytes per second; the interval's ends change places."""
    if seconds.value <= 0:
        return None
    low, high = (None if not end else nbytes / end for end in (seconds.high, seconds.low))
    return Estimate(nbytes / seconds.value, low, high)


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


def _ranks(samples: Sequence[Sample], rng: np.random.Generator) -> tuple[RankRow, ...]:
    table = np.array([one.ranks_s for one in samples], dtype=float)
    slowest = Counter(one.slowest_rank for one in samples)
    latest = Counter(table.argmin(axis=1).tolist())
    return tuple(
        RankRow(rank, spread.times(own, rng), slowest[rank] / len(samples), latest[rank] / len(samples))
        for rank, own in enumerate(table.T)
    )


def _outliers(results: EmulateResults, columns: Columns) -> tuple[Outlier, ...]:
    found = []
    for size in np.unique(columns["nbytes"]).tolist():
        rows = np.flatnonzero(columns["nbytes"] == size)
        delays = columns["slowest_s"][rows]
        median = float(np.median(delays))
        for row in rows[delays > spread.fence(delays)].tolist():
            found.append(_outlier(results, results.samples[row], median))
    return tuple(sorted(found, key=lambda one: -one.slowest_s))


def _outlier(results: EmulateResults, sample: Sample, median: float) -> Outlier:
    late = len(sample.ranks_s) > 1 and sample.skew_s > sample.slowest_s / 2
    return Outlier(
        trial=sample.trial,
        index=sample.index,
        name=results.plan.collectives[sample.index].name,
        nbytes=sample.nbytes,
        slowest_s=sample.slowest_s,
        skew_s=sample.skew_s,
        transfer_s=sample.transfer_s,
        slowest_rank=sample.slowest_rank,
        latest_rank=int(np.argmin(sample.ranks_s)) if late else None,
        times_median=sample.slowest_s / median if median > 0 else None,
    )


def _notes(rows: Sequence[SizeRow], overall: SizeRow, ranks: Sequence[RankRow], results: EmulateResults) -> list[str]:
    """Sentences below the tables: what is left out, what the delays mostly are, what was not checked."""
    notes = []
    fewest = min(row.slowest.count for row in rows)
    missing = [name for name, least in spread.LEAST.items() if fewest < least]
    if missing:
        needs = ", ".join(f"{name} needs {spread.LEAST[name]}" for name in missing)
        notes.append(f"Left out where a size has too few samples: {needs}; some size has {fewest}.")
    if fewest < spread.ENOUGH_FOR_OUTLIERS:
        notes.append(f"No outlier is looked for among fewer than {spread.ENOUGH_FOR_OUTLIERS} samples of a size.")
    usual = overall.slowest.p50.value
    if usual > 0 and overall.skew.p50.value > _MUCH_SKEW * usual:
        latest = max(ranks, key=lambda one: one.latest)
        notes.append(
            f"The ranks arrive {1000 * overall.skew.p50.value:.3g} ms apart (median), of {1000 * usual:.3g} ms in all: "
            f"most of the delay is waiting for late ranks, not transfer; rank {latest.rank} comes last most often, in "
            f"{share_text(latest.latest)}."
        )
    if not results.asked.check:
        notes.append("The results of the collectives were not checked (--no-check).")
    return notes
