"""What a check finds, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from textwrap import TextWrapper
from typing import Any, TypeVar

from rich.text import Text

from hvdkit.common.json_files import Part

LEVELS = {"error": "red", "warning": "yellow", "info": "cyan"}
"""error: training does not work; warning: it works badly or in some uses not; info: good to know. And their colours."""
WIDEST = 110
"""Columns that findings fill at most."""
Facts = TypeVar("Facts")


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


def examine(checks: Iterable[Callable[[Facts], Iterable[Found]]], facts: Facts) -> list[Found]:
    """What a table of checks finds, errors first."""
    found = [one for check in checks for one in check(facts)]
    return sorted(found, key=lambda one: list(LEVELS).index(one.level))


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


def paragraphs(findings: Iterable[Found], width: int) -> list[str | Text]:
    """Findings as parts of a page, each after an empty line."""
    parts: list[str | Text] = []
    for one in findings:
        head = Text.assemble((one.level, f"bold {LEVELS[one.level]}"), f" [{one.check}]")
        parts += ["", head, *explanation(one, min(width, WIDEST))]
    return parts


def has_errors(findings: Iterable[Found]) -> bool:
    """Whether training does not work."""
    return any(one.level == "error" for one in findings)
