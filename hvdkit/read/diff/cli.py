"""``hvdkit diff``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from hvdkit.common.commands import AT_LEAST_0, PATH, number, print_any_name
from hvdkit.common.intervals import Estimate
from hvdkit.common.table import Page, Table
from hvdkit.common.units import interval_text, number_text, shortened
from hvdkit.read.diff.comparison import Change, Difference, signed
from hvdkit.read.diff.comparison import diff as compare

_NAME = 60
"""Characters of a name."""
_HEADINGS = {"whole": "whole", "part": "parts", "detail": "details"}
"""Of the first column, by level."""


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
