"""The answer in at most ten lines, the verdict first."""

from __future__ import annotations

from hvdkit.common.units import duration_text, printable
from hvdkit.read.explain.results import Explanation

LINES = 10
_FURTHER = 3
"""Causes after the first one that are said."""
_UNTOLD = 3


def lines(found: Explanation) -> list[str]:
    """What is printed."""
    if not found.causes and found.stalled is None:
        first = ["Nothing that is worth changing was found." if found.steps else "No cause of lost time was found."]
    else:
        first = [] if found.stalled is None else [found.stalled]
        for cause in found.causes[:1]:
            first += [cause.sentence(), f"  Seen in {cause.evidence}", f"  {cause.advice}"]
    further = [f"Also: {cause.sentence()} {cause.advice}" for cause in found.causes[1 : 1 + _FURTHER]]
    left = len(found.causes) - 1 - _FURTHER
    untold = [f"Not told: {sentence}" for sentence in found.untold[:_UNTOLD]]
    more = [f"{left} smaller causes are in --json."] if left > 0 else []
    read = ", ".join(f"{one.what} ({one.says})" for one in found.read)
    step = "" if found.step_s is None else f"; a step takes {duration_text(1e6 * found.step_s)}"
    room = LINES - len(first) - len(further) - len(more) - 1
    said = [*first, *further, *more, *untold[:room], f"Read: {read}{step}."]
    return [printable(line) for line in said]
