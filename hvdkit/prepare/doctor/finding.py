"""A finding, and the checks that come to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.common.json_files import Part
from hvdkit.prepare.doctor.facts import Facts

LEVELS = ("error", "warning", "info")
"""error: training would not work; warning: it works badly or in some uses not; info: good to know."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, why that matters, and what to do.

    Attributes:
        level: one of LEVELS.
        what, why, fix: a sentence or two each; ``fix`` names the command where there is one.
    """

    level: str
    what: str
    why: str
    fix: str


class Found(Part, frozen=True):
    """A finding as JSON.

    Attributes:
        check: the name of the check.
        level: "error", "warning" or "info".
        what, why, fix: a sentence or two each.
    """

    check: str
    level: str
    what: str
    why: str
    fix: str


def found_as(findings: Sequence[tuple[str, Finding]]) -> tuple[Found, ...]:
    """Findings with the names of their checks, for a program."""
    return tuple(Found(name, one.level, one.what, one.why, one.fix) for name, one in findings)


@dataclass(frozen=True)
class Check:
    """A row of the table of checks: its name, and the function that comes to a finding, or None when all is well."""

    name: str
    function: Callable[[Facts], Finding | None]
