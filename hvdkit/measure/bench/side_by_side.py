"""Two results side by side: what every command that compares two result files takes and prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from hvdkit.common.commands import FILE, number
from hvdkit.common.table import Page, Table

SPEED = "speed of B / A"


@dataclass(frozen=True, slots=True)
class BothMeasured:
    """What both results measured, for a reader.

    Attributes:
        cells: of the table: what it is, its time in A and in B, the speed of B compared with A.
        subject: what it is at the start of a sentence.
        speed: the speed without its interval.
        failed: whether it is below the limit with its whole interval.
    """

    cells: Sequence[str]
    subject: str
    speed: float
    failed: bool


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


def page(names: tuple[str, str, str], lines: Sequence[BothMeasured], limit: float | None, notes: Sequence[str]) -> Page:
    """The table, the notes and what is below the limit.

    Args:
        names: of the first three columns.
        limit: of ``--fail-below``.
        notes: full sentences.
    """
    table = Table("", (*names, SPEED), [line.cells for line in lines])
    return Page([table, *(f"- {note}" for note in notes), *([] if limit is None else _verdicts(lines, limit))])


def _verdicts(lines: Sequence[BothMeasured], limit: float) -> list[str]:
    found = []
    for line in lines:
        if line.failed:
            verdict = f"below {limit:g}, failed"
        elif line.speed < limit:
            verdict = f"below {limit:g}, but its interval reaches above: not sure enough to fail"
        else:
            continue
        found.append(f"{line.subject}: speed {line.cells[-1]} is {verdict}.")
    return found if any(line.failed for line in lines) else [*found, f"No speed is below {limit:g} beyond noise."]
