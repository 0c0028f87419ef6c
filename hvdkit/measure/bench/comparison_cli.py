"""``hvdkit bench compare``."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common.table import Page
from hvdkit.common.units import interval_text, ranks_text
from hvdkit.measure.bench import comparison, results, side_by_side


@click.command()
@side_by_side.arguments
@side_by_side.fail_below("number of ranks")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
def compare(before: Path, after: Path, limit: float | None, form: str | None) -> int:
    """Compare two results of `hvdkit bench scaling`, number of ranks by number of ranks.

    The speed of B compared with A is above 1 where B is faster. Other differences (commit, versions,
    cores) are listed, too. With --fail-below it also fails where A has jobs that count and all jobs of B failed.

    \b
    Example, for continuous integration:
      hvdkit bench compare main.json branch.json --fail-below 0.95

    Exit status: 0; 1 when a speed is below --fail-below beyond noise, or a file cannot be used; 2 for bad usage.
    """
    first, second = results.read(before), results.read(after)
    compared = comparison.compare(first, second)
    slower = side_by_side.below(compared, limit)
    gone = [] if limit is None else comparison.unmeasured(first, second)
    notes = comparison.differences(first, second)
    below = tuple(one.ranks for one in slower)
    found = comparison.Comparison(tuple(compared), tuple(notes), limit, below, tuple(gone))
    lines = [
        side_by_side.Line(
            (str(one.ranks), interval_text(one.before), interval_text(one.after), interval_text(one.speed)),
            f"On {ranks_text(one.ranks)}",
            one.speed.value,
            one in slower,
        )
        for one in compared
    ]
    shown = side_by_side.page(("ranks", "A, seconds", "B, seconds"), lines, limit, notes)
    Page([*shown.parts, *(f"On {ranks_text(n)}: no job of B counts, failed." for n in gone)]).print(form, found)
    return 1 if slower or gone else 0
