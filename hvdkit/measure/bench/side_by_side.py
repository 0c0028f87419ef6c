"""Two results side by side: what every command that compares two result files takes and prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from hvdkit.common.commands import FILE, number
from hvdkit.common.table import Page, Table
from hvdkit.common.units import interval_text

SPEED = "speed of B / A"


def arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a click command with the two files, ``before`` and ``after``."""
    return click.argument("before", type=FILE, metavar="A.json")(
        click.argument("after", type=FILE, metavar="B.json")(command)
    )


def fail_below(where: str) -> Callable[..., Any]:
    """The option ``--fail-below``, as ``limit``.

    Args:
        where: what is compared one by one: "size".
    """
    return click.option(
        "--fail-below",
        "limit",
        type=float,
        callback=number(0, above=True),
        metavar="RATIO",
        help=f"Exit with 1 when B's speed compared with A's is below this at some {where}, with its whole 95% "
        "interval.",
    )


def below(compared: Sequence[Any], limit: float | None) -> list[Any]:
    """Those whose whole interval (without one, whose value) is below the limit; none where there is no limit."""
    if limit is None:
        return []
    return [one for one in compared if (one.speed.value if one.speed.high is None else one.speed.high) < limit]


def page(
    names: tuple[str, str, str],
    lines: Sequence[tuple[str, str, Any]],
    limit: float | None,
    notes: Sequence[str],
    factor: float = 1.0,
    digits: int = 3,
) -> Page:
    """The table, the notes and what is below the limit.

    Args:
        names: of the first three columns.
        lines: what it is, in the table and at the start of a sentence; and its ``before``, ``after`` and ``speed``.
        limit: of ``--fail-below``.
        notes: full sentences.
        factor: the unit of the table has 1 / factor seconds.
        digits: that are shown.
    """
    cells = []
    for name, _, one in lines:
        estimates = (one.before.scaled(factor), one.after.scaled(factor), one.speed)
        cells.append([name, *(interval_text(each, digits) for each in estimates)])
    found: list[Table | str] = [Table("", (*names, SPEED), cells), *(f"- {note}" for note in notes)]
    if limit is None:
        return Page(found)
    failed = below([one for _, _, one in lines], limit)
    for (_, subject, one), (*_, speed) in zip(lines, cells, strict=True):
        if one in failed:
            found.append(f"{subject}: speed {speed} is below {limit:g}, failed.")
        elif one.speed.value < limit:
            not_sure = "but its interval reaches above: not sure enough to fail"
            found.append(f"{subject}: speed {speed} is below {limit:g}, {not_sure}.")
    return Page(found if failed else [*found, f"No speed is below {limit:g} beyond noise."])
