"""A finding, of the doctor or of a preflight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from textwrap import TextWrapper
from typing import Any

from hvdkit.common.json_files import Part

LEVELS = ("error", "warning", "info")
"""error: training would not work; warning: it works badly or in some uses not; info: good to know."""


class Found(Part, frozen=True):
    """What a check says is wrong, why that matters, and what to do.

    Attributes:
        check: the name of the check.
        level: "error", "warning" or "info".
        what, why, fix: a sentence or two each; ``fix`` names the command where there is one.
    """

    check: str
    level: str
    what: str
    why: str
    fix: str


def _at(level: str) -> Callable[[str, str, str, str], Found]:
    return lambda check, what, why, fix: Found(check, level, what, why, fix)


error, warning, info = map(_at, LEVELS)
"""A finding of this level, from its other fields."""


def worst_first(findings: Iterable[Found]) -> list[Found]:
    """Errors, then warnings, then the rest."""
    return sorted(findings, key=lambda one: LEVELS.index(one.level))


def explanation(finding: Any, width: int, hanging: int = 4, end: str = "") -> list[str]:
    """What, why and fix of a finding, in lines of at most ``width`` columns where words allow.

    Args:
        finding: with these three texts.
        width: in columns.
        hanging: columns in front of a further line.
        end: what follows each text.
    """
    wrapper = TextWrapper(width, "  ", " " * hanging, break_long_words=False, break_on_hyphens=False)
    return [wrapper.fill(f"{label}: {getattr(finding, label)}{end}") for label in ("what", "why", "fix")]


def has_errors(findings: Iterable[Found]) -> bool:
    """Whether training would not work."""
    return any(one.level == "error" for one in findings)
