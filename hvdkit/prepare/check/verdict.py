"""What is said of one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DONE = "done"
MISSING = "missing"
NOT_NEEDED = "not needed"
UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """Whether a script does a step.

    Attributes:
        status: DONE, MISSING, NOT_NEEDED or UNDECIDED.
        lines: where it is done.
        note: why it is not needed or undecided, or what else a reader should know; "" for nothing.
        blamed: the lines where something is missing for certain; empty where that is no finding.
    """

    status: str
    lines: tuple[int, ...] = ()
    note: str = ""
    blamed: tuple[int, ...] = ()


def done(lines: Iterable[int], note: str = "") -> Verdict:
    """The step is done at these lines."""
    return Verdict(DONE, tuple(sorted(set(lines))), note)


def missing(blamed: Iterable[int], note: str = "") -> Verdict:
    """The step is missing, and that is a finding at these lines."""
    return Verdict(MISSING, (), note, tuple(sorted(set(blamed))))


def not_needed(note: str, lines: Iterable[int] = ()) -> Verdict:
    """The step is nobody's duty here."""
    return Verdict(NOT_NEEDED, tuple(sorted(set(lines))), note)


def undecided(note: str) -> Verdict:
    """The text does not settle it."""
    return Verdict(UNDECIDED, (), note)


def may_do_it(who: str) -> Verdict:
    """Code that is not in this text may do the step."""
    return undecided(f"{who} may do it, which is not read here")
