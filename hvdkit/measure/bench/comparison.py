"""Two results of the same training: which is faster, and how sure that is."""

from __future__ import annotations

import numpy as np

from hvdkit.common import intervals
from hvdkit.common.intervals import Estimate
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import ranks_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.bench import results
from hvdkit.measure.bench.results import ScalingResults


class ComparedRanks(Part, frozen=True, rename={"before": "before_s", "after": "after_s"}):
    """One number of ranks.

    Attributes:
        ranks: the number.
        before, after: seconds.
        speed: of the second result compared with the first: above 1 it is faster.
    """

    ranks: int
    before: Estimate
    after: Estimate
    speed: Estimate


def compare(before: ScalingResults, after: ScalingResults) -> list[ComparedRanks]:
    """Compare two results at the numbers of ranks that both have.

    Raises:
        InvalidArgumentError: they measured different things, or have no number of ranks in common.
    """
    modes = ("mode", before.asked.mode, after.asked.mode)
    for what, first, second in (modes, ("measure", before.measure, after.measure)):
        if first != second:
            raise InvalidArgumentError(
                f"The two results have different {what}s, {first or 'none'!r} and {second or 'none'!r}; compare two "
                "that were measured alike."
            )
    rng = np.random.default_rng(0)
    first_samples, second_samples = before.samples(), after.samples()
    common = sorted(first_samples.keys() & second_samples.keys())
    if not common:
        raise InvalidArgumentError(
            f"The two results have no number of ranks in common: {sorted(first_samples)} and {sorted(second_samples)}."
        )
    return [
        ComparedRanks(
            n,
            intervals.median(first_samples[n], rng),
            intervals.median(second_samples[n], rng),
            intervals.ratio(first_samples[n], second_samples[n], rng),
        )
        for n in common
    ]


def unmeasured(before: ScalingResults, after: ScalingResults) -> list[int]:
    """Numbers of ranks that both were asked for, and at which the first has jobs that count and the second none."""
    gone = before.samples().keys() - after.samples().keys()
    return sorted(gone & set(after.asked.ranks))


def differences(before: ScalingResults, after: ScalingResults) -> list[str]:
    """What else is different, full sentences: a reason not to take the speed for the script's alone.

    Numbers of ranks that one of the two does not have come first.
    """
    first_ranks, second_ranks = before.samples().keys(), after.samples().keys()
    notes = [
        f"Not compared: {ranks_text(n)}, at which only the {'first' if n in first_ranks else 'second'} has a job that "
        "counts."
        for n in sorted(first_ranks ^ second_ranks)
    ]
    notes += [
        f"Different {name}: {first} before, {second} after."
        for name, first, second in results.differences(before, after)
        if name not in ("ranks", "repeats", "seed")
    ]
    return notes


class ScalingComparison(Document, frozen=True):
    """Two results of the same training, side by side.

    Attributes:
        rows: by number of ranks.
        notes: what else is different, full sentences.
        fail_below: the limit that was given; None without one.
        below: numbers of ranks at which the speed is below it with its whole interval.
        unmeasured: see ``unmeasured``; empty without a limit.
        confidence: of the intervals.
    """

    kind = "bench-comparison"
    written_by = "hvdkit bench compare --json"

    rows: tuple[ComparedRanks, ...]
    notes: tuple[str, ...]
    fail_below: float | None
    below: tuple[int, ...]
    unmeasured: tuple[int, ...]
    confidence: float = intervals.CONFIDENCE
