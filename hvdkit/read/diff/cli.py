"""``hvdkit diff``: by how much each thing takes longer, how sure that is, and what explains the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
from msgspec.structs import replace

from hvdkit.common import files, intervals
from hvdkit.common.commands import AT_LEAST_0, PATH, number, print_any_name
from hvdkit.common.intervals import Estimate
from hvdkit.common.json_files import Document, Part
from hvdkit.common.table import Page, Table
from hvdkit.common.units import change_text, duration_text, interval_text, number_text, printable, shortened
from hvdkit.errors import DataNotFoundError, InvalidArgumentError, require_scipy
from hvdkit.read.diff.sides import READERS, Side, Timings
from hvdkit.read.explain.sources import LAUNCH, Read, find

SIGNIFICANCE = 0.05
"""Share of false changes that is accepted among the parts, and among the details, that are called sure."""
_EXPLAINS = 0.25
"""Part of the whole change from which on a part explains it."""
_NAME = 60
"""Characters of a name."""
_HEADINGS = {"whole": "whole", "part": "parts", "detail": "details"}
"""Of the first column, by level."""


class Change(Part, frozen=True, rename={"before": "before_s", "after": "after_s"}):
    """One thing in both recordings.

    Attributes:
        what: its name.
        level: "whole" (what a user waits for), "part" (of the last of these) or "detail".
        before, after: medians in seconds; None where the recording does not have it.
        explains_s: seconds by which a step (what is recorded, where there are no steps) is longer in B on account of
            it, by the means; parts add up to the whole.
        speed: of B compared with A, above 1 it is faster, with its interval; of details and of those that take no time
            it is None.
        sure: whether the change is more than chance; None where it was measured once.
        calls_before, calls_after: of a step, or in all; None where they are not counted.
    """

    what: str
    level: str
    before: Estimate | None
    after: Estimate | None
    explains_s: float
    speed: Estimate | None = None
    sure: bool | None = None
    calls_before: float | None = None
    calls_after: float | None = None


class Difference(Document, frozen=True):
    """Two recordings or results of one kind: what changed, and what explains it.

    Attributes:
        of: what they are: "step times", "monitor history", "timeline", "trace", "mpi profile", "bench results" or
            "emulate results".
        a, b: what was before, and what is now.
        verdict: one sentence: what the step took before and takes now, and what explains the change.
        changes: the whole first, then its parts, then details; of the latter two the sure ones, and those that explain
            most, first.
        notes: what else is different, and what a reader should know, full sentences.
        below: what of the whole is slower than was asked for, with its whole interval, or was not measured any more.
        confidence: of the intervals.
    """

    kind = "diff"
    schema = 3
    written_by = "hvdkit diff --json"

    of: str
    a: Read
    b: Read
    verdict: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    below: tuple[str, ...] = ()
    confidence: float = intervals.CONFIDENCE


@click.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--top", type=AT_LEAST_0, default=20, metavar="N", help="Details to list.")
@click.option(
    "--fail-below",
    "limit",
    type=float,
    callback=number(0, above=True),
    metavar="RATIO",
    help="Exit with 1 when B's speed compared with A's is below this, with its whole 95% interval.",
)
@click.option("--json", "form", flag_value="json", help="Print one JSON object, with all details; times in seconds.")
def diff(a: Path, b: Path, top: int, limit: float | None, form: str | None) -> int:
    """Say what a step took in A and takes in B, and what explains the change.

    A and B are two of one kind: step times of `launch --explain-job`, a monitor's metrics.jsonl, Horovod timelines,
    PyTorch traces, MPI profiles, results of `bench scaling` or of `emulate`; or directories with one of them. A change
    is sure when it is more than chance within the two. Different ranks, versions and settings are listed, too.

    \b
    Examples:
      hvdkit diff hvdkit-job-20250131-120000 hvdkit-job-20250131-130000
      hvdkit diff before.json after.json --top 5
      hvdkit diff main.json branch.json --fail-below 0.95

    Exit status: 0, also when they differ; 1 when a speed is below --fail-below beyond chance or is not measured any
    more, or when a file cannot be used; 2 for bad usage.
    """
    print_any_name()
    found = compare(a, b, limit)
    _page(found, top).print(form, found)
    return 1 if found.below else 0


def compare(a: Path, b: Path, fail_below: float | None = None) -> Difference:
    """Compare two recordings, or results, of one kind.

    Whole things are compared by the ratio of medians with its bootstrap interval. Parts and details are compared by the
    Mann-Whitney U test, corrected for their number, also where they depend on each other. Samples of one run count as
    independent: what disturbs several steps in a row makes changes seem surer than they are.

    Args:
        a, b: files or directories; what was before, and what is now.
        fail_below: the speed below which ``below`` names what is slower.
    Raises:
        InvalidArgumentError: they are of different kinds, or have nothing in common.
        DataNotFoundError, DataError: one is missing, no recording, or cannot be read.
        MissingFrameworkError: SciPy is not installed.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; Mann and Whitney, Annals of
        Mathematical Statistics 18 (1947); Benjamini and Yekutieli, Annals of Statistics 29 (2001), theorem 1.3.
    """
    require_scipy("two recordings are compared")
    for path in (a, b):
        if not files.exists(path):
            raise DataNotFoundError(f"No file or directory at {str(path)!r}; give two recordings of one kind.")
    found = [find([path], (*READERS, LAUNCH), nearest=True) for path in (a, b)]
    common = [kind for kind in READERS if all(kind in one for one in found)]
    if not common:
        held = [" and ".join(kind for kind in (*READERS, LAUNCH) if kind in one) or "no times" for one in found]
        raise InvalidArgumentError(
            f"Two kinds do not compare: {printable(str(a))} ({held[0]}) and {printable(str(b))} ({held[1]}); give two "
            f"of one kind: {', '.join(READERS)}."
        )
    first, second = (READERS[common[0]](sources) for sources in found)
    if not first.whole.keys() & second.whole.keys():
        names = [", ".join(list(side.whole)[:4]) for side in (first, second)]
        raise InvalidArgumentError(
            f"The two {common[0]} have nothing in common that can be compared: {printable(names[0])} in A and "
            f"{printable(names[1])} in B; give two that were recorded alike."
        )
    whole = _changes("whole", first.whole, second.whole)
    parts, details = _changes("part", first.parts, second.parts), _changes("detail", first.details, second.details)
    below: tuple[str, ...] = ()
    if fail_below is not None:  # slower with the whole interval; without one, by its value
        speeds = {change.what: change.speed for change in whole if change.speed is not None}
        slower = (what for what, one in speeds.items() if (one.value if one.high is None else one.high) < fail_below)
        below = (*slower, *(name for name in first.whole if name in second.missing))
    notes = _differences(first, second) + list(dict.fromkeys((*first.notes, *second.notes)))
    if common[1:]:
        notes.append(f"Both hold more, of which name the files to compare them: {', '.join(common[1:])}.")
    return Difference(
        of=common[0],
        a=Read(str(a), common[0], first.says),
        b=Read(str(b), common[0], second.says),
        verdict=printable(_verdict(whole, parts, details)),
        changes=(*whole, *parts, *details),
        notes=tuple(notes),
        below=below,
    )


def _changes(level: str, a: Mapping[str, Timings], b: Mapping[str, Timings]) -> list[Change]:
    """What either side has of a level, or both of the whole; the sure ones, and those that explain most, first."""
    from scipy.stats import false_discovery_control, mannwhitneyu

    def median(times: Timings) -> Estimate | None:
        return Estimate(float(np.median(times.samples))) if len(times.samples) else None

    def cost(times: Timings) -> float:
        return times.often * float(times.samples.sum()) / max(1, len(times.samples))

    rng = np.random.default_rng(0)
    nothing = Timings(np.zeros(0))
    found, p_values = list[Change](), dict[str, float]()
    for name in dict.fromkeys([*a, *b]):
        before, after = a.get(name, nothing), b.get(name, nothing)
        speed, sure, medians = None, None, (median(before), median(after))
        if level == "whole" and (name not in a or name not in b):
            continue
        if level == "whole":
            if min(np.median(before.samples), np.median(after.samples)) > 0:
                speed = intervals.ratio(before.samples, after.samples, rng)
                sure = None if speed.low is None or speed.high is None else not speed.low <= 1 <= speed.high
            medians = (intervals.median(before.samples, rng), intervals.median(after.samples, rng))
        elif min(len(before.samples), len(after.samples)) > 1:
            p_values[name] = float(np.nan_to_num(mannwhitneyu(before.samples, after.samples).pvalue, nan=1.0))
        explains = cost(after) - cost(before)
        one = Change(name, level, *medians, explains, speed, sure)
        found.append(replace(one, calls_before=before.calls, calls_after=after.calls))
    if p_values:
        corrected = false_discovery_control(list(p_values.values()), method="by") < SIGNIFICANCE
        sure_by_name = dict(zip(p_values, corrected.tolist(), strict=True))
        found = [replace(change, sure=sure_by_name.get(change.what)) for change in found]
    return found if level == "whole" else sorted(found, key=lambda one: (one.sure is False, -abs(one.explains_s)))


def _verdict(whole: Sequence[Change], parts: Sequence[Change], details: Sequence[Change]) -> str:
    """What the last of the whole took and takes, and which part explains its change."""
    last = whole[-1]
    before, after = (one.value for one in (last.before, last.after) if one is not None)
    said = f"The {last.what} takes {duration_text(1e6 * before)} in A and {duration_text(1e6 * after)} in B"
    if before > 0:
        said += f" ({change_text(after / before - 1)})"
    if last.sure is False:
        return f"{said}, which may be chance."
    if not last.explains_s:
        return f"{said}."

    def largest(among: Sequence[Change]) -> Change | None:
        same = [one for one in among if one.sure is not False and one.explains_s * last.explains_s > 0]
        most = max(same, key=lambda one: abs(one.explains_s), default=None)
        return most if most is not None and abs(most.explains_s) >= _EXPLAINS * abs(last.explains_s) else None

    part, detail = largest(parts), largest(details)
    if part is None and detail is None:
        return f"{said}; no part of it that is recorded explains that." if parts else f"{said}."
    explained = [f"{one.what} ({signed(one.explains_s)})" for one in (part, detail) if one is not None]
    return f"{said}: {', most of all '.join(explained)}."


def signed(seconds: float) -> str:
    """A change in seconds with its sign and unit."""
    return ("-" if seconds < 0 else "+") + duration_text(abs(1e6 * seconds))


def _differences(a: Side, b: Side) -> list[str]:
    notes = []
    for side, other, which in ((a, b, "A"), (b, a, "B")):
        if only := [name for name in side.whole if name not in other.whole]:
            notes.append(f"Only in {which}: {printable(', '.join(only))}.")
    for name in dict.fromkeys([*a.settings, *b.settings]):
        was, is_ = a.settings.get(name, "none"), b.settings.get(name, "none")
        if was != is_:
            notes.append(printable(f"Different {name}: {was} before, {is_} after."))
    return notes


def _ms(estimate: Estimate | None) -> str | None:
    return None if estimate is None else interval_text(estimate.scaled(1e3))


COLUMNS: dict[str, Callable[[Change], object]] = {
    "A, ms": lambda change: _ms(change.before),
    "B, ms": lambda change: _ms(change.after),
    "explains": lambda change: signed(change.explains_s),
    "speed of B / A": lambda change: None if change.speed is None else interval_text(change.speed),
    "sure": lambda change: None if change.sure is None else "yes" if change.sure else "?",
    "calls A": lambda change: None if change.calls_before is None else number_text(change.calls_before),
    "calls B": lambda change: None if change.calls_after is None else number_text(change.calls_after),
}
"""Heading and cell of the tables' columns."""


def _page(found: Difference, top: int) -> Page:
    parts: list[Table | str] = [found.verdict, ""]
    parts += [f"{name}: {side.says}, {side.path}" for name, side in (("A", found.a), ("B", found.b))]
    for level, heading in _HEADINGS.items():
        rows = [
            change for change in found.changes if change.level == level and (change.explains_s or level != "detail")
        ]
        shown = rows[:top] if level == "detail" else rows
        if shown:
            heading = heading if shown == rows else f"{heading} ({len(shown)} of {len(rows)})"
            parts.append(Table.of(shown, {heading: lambda change: shortened(change.what, _NAME), **COLUMNS}))
    parts += [f"{name}: its speed is below the limit, or it was not measured any more; failed." for name in found.below]
    return Page(parts, found.notes)
