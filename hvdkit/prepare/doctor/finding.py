"""A finding, and the table of what can be found: a row has its words beside the function that looks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from textwrap import TextWrapper
from typing import Any, Generic, TypeVar

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


@dataclass(frozen=True)
class Checks(Generic[Facts]):
    """A table of checks, in the order in which findings of one level are shown.

    Attributes:
        rows: the texts of a finding, which have places for words in braces, and the probe: from facts, the words of
            each time that it is found.
    """

    rows: list[tuple[Found, Callable[[Facts], Iterable[Mapping[str, Any]]]]] = field(default_factory=list)

    def row(self, check: str, level: str, what: str, why: str, fix: str) -> Callable[..., Any]:
        """A decorator that adds a row, by its probe; the texts are those of ``Found``, ``{facts}`` is a word, too."""

        def add(probe: Callable[[Facts], Iterable[Mapping[str, Any]]]) -> Callable[..., Any]:
            self.rows.append((Found(check, level, what, why, fix), probe))
            return probe

        return add

    def examine(self, facts: Facts) -> list[Found]:
        """What all checks find, errors first."""
        found = [
            Found(*(getattr(texts, name).format(facts=facts, **words) for name in Found.__struct_fields__))
            for texts, probe in self.rows
            for words in probe(facts)
        ]
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
