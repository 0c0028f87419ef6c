"""Two results of the same collectives: which is faster, and how sure that is."""

from __future__ import annotations

import numpy as np

from hvdkit.common import intervals
from hvdkit.common.intervals import CONFIDENCE, Estimate
from hvdkit.common.json_files import Document, Part
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.measure.emulate.analysis import of_steps
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.emulate.spread import Floats

SLOWEST, TRANSFER = "slowest", "transfer"
STEP = "step"


class ComparedSize(Part, frozen=True, rename={"nbytes": "size", "before": "before_s", "after": "after_s"}):
    """One size, or whole steps.

    Attributes:
        nbytes: the size; None for whole steps, see ``analysis.of_steps``.
        before, after: medians in seconds.
        speed: of the second result compared with the first: above 1 it is faster.
    """

    nbytes: int | None
    before: Estimate
    after: Estimate
    speed: Estimate

    @property
    def name(self) -> str:
        """The size in bytes, or "step"."""
        return STEP if self.nbytes is None else str(self.nbytes)


def compare(before: EmulateResults, after: EmulateResults, by: str = SLOWEST) -> list[ComparedSize]:
    """Compare two results size by size, and step by step where both replayed the same sizes.

    Args:
        before, after: with at least one sample each.
        by: "slowest", the delay that the job sees, or "transfer", from the last rank's arrival on.
    Raises:
        DataError: one of them has no sample.
        InvalidArgumentError: different collectives, or no size in common.
    """
    for what, results in (("first", before), ("second", after)):
        if not results.samples:
            raise DataError(f"The {what} result holds no sample; compare results of runs that measured something.")
    kinds = [results.asked.collective for results in (before, after)]
    if kinds[0] != kinds[1]:
        raise InvalidArgumentError(
            f"The first result is of {kinds[0]} and the second of {kinds[1]}; compare two of the same collective."
        )
    rng = np.random.default_rng(0)
    times = f"{by}_s"
    first, second = _by_size(before, times), _by_size(after, times)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise InvalidArgumentError(
            f"The two results have no size in common: {_few(first)} and {_few(second)} bytes; compare two of one plan."
        )
    found = [_compared(size, first[size], second[size], rng) for size in common]
    if _plan_sizes(before) == _plan_sizes(after):
        steps = [of_steps(results, results.column(times)) for results in (before, after)]
        if min(map(len, steps)):
            found.append(_compared(None, steps[0], steps[1], rng))
    return found


def _compared(nbytes: int | None, before: Floats, after: Floats, rng: np.random.Generator) -> ComparedSize:
    if not (np.median(before) > 0 and np.median(after) > 0):
        what = STEP if nbytes is None else f"{nbytes} bytes"
        raise DataError(
            f"The median time of {what} is 0 in one of the results, so that there is no ratio; use --by slowest."
        )
    return ComparedSize(
        nbytes, intervals.median(before, rng), intervals.median(after, rng), intervals.ratio(before, after, rng)
    )


def _by_size(results: EmulateResults, times: str) -> dict[int, Floats]:
    sizes, seconds = results.column("nbytes"), results.column(times)
    return {size: seconds[sizes == size] for size in np.unique(sizes).tolist()}


def _plan_sizes(results: EmulateResults) -> list[int]:
    return [one.nbytes for one in results.plan.collectives]


def _few(sizes: dict[int, Floats]) -> str:
    words = [str(size) for size in sorted(sizes)]
    return ", ".join(words[:5]) + (" ..." if len(words) > 5 else "")


def differences(before: EmulateResults, after: EmulateResults) -> list[str]:
    """What else is different, full sentences: a reason not to take the speed for one cause's alone."""
    notes = []
    first, second = before.settings(), after.settings()
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            was, is_ = first.get(name, "none"), second.get(name, "none")
            notes.append(f"Different {name}: {was} before, {is_} after.")
    types = [sorted({one.dtype for one in results.plan.collectives}) for results in (before, after)]
    if types[0] != types[1]:
        notes.append(f"Different types: {', '.join(types[0])} before, {', '.join(types[1])} after.")
    if _plan_sizes(before) != _plan_sizes(after):
        notes.append("Different plans: only sizes that both have are compared, and no whole steps.")
    elif [one.gap_s for one in before.plan.collectives] != [one.gap_s for one in after.plan.collectives]:
        notes.append("Different gaps: the computation between the collectives is not the same.")
    notes.append(
        "The intervals hold the noise within each run, not what changes from run to run (placement, other jobs)."
    )
    return notes


class EmulateComparison(Document, frozen=True):
    """Two results of the same collectives, side by side.

    Attributes:
        by: what was compared, "slowest" or "transfer".
        rows: by size, then whole steps.
        notes: what else is different, full sentences.
        fail_below: the limit that was given; None without one.
        below: sizes, or "step", whose speed is below it with its whole interval.
        confidence: of the intervals.
    """

    kind = "emulate-comparison"
    written_by = "hvdkit emulate compare --json"

    by: str
    rows: tuple[ComparedSize, ...]
    notes: tuple[str, ...]
    fail_below: float | None
    below: tuple[str, ...]
    confidence: float = CONFIDENCE
