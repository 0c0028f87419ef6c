"""A finding, of the doctor or of a preflight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hvdkit.common.json_files import Part

LEVELS = ("error", "warning", "info")
"""error: training would not work; warning: it works badly or in some uses not; info: good to know."""


class Finding(NamedTuple):
    """What a check says is wrong, why that matters, and what to do.

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


def worst_first(findings: Iterable[tuple[str, Finding]]) -> list[Found]:
    """Findings with the names of their checks: errors, then warnings, then the rest."""
    found = [Found(name, *finding) for name, finding in findings]
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def has_errors(findings: Iterable[Found]) -> bool:
    """Whether training would not work."""
    return any(one.level == "error" for one in findings)
