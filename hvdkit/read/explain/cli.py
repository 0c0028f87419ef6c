"""``hvdkit explain``."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common.table import Page
from hvdkit.common.units import count_text, duration_text, printable, share_text
from hvdkit.read.explain.join import Explanation
from hvdkit.read.explain.join import explain as explanation
from hvdkit.read.explain.step_causes import NOTHING_FOUND

LINES = 10
"""At most; the verdict first."""
_FURTHER = 3
"""Causes after the first one that are said."""
_UNTOLD = 3


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="FILE|DIR...")
@click.option("--json", "form", flag_value="json", help="Print one JSON object; times in seconds.")
def explain(paths: tuple[Path, ...], form: str | None) -> int:
    """Name what costs a job most time: how much, the evidence and the fix, in at most ten lines.

    Reads the recordings of one job: the times of its steps, Horovod's timeline, PyTorch's traces, MPI profiles,
    stall reports, how it was launched. DIR stands for all of these in it. Causes are weighed by the time that they
    cost. A straggler counts from 4 % of it, input of all ranks from 10 %, the allreduce from 20 %.

    \b
    Examples:
      hvdkit launch -n 4 --explain-job -- python train.py
      hvdkit explain hvdkit-job-20250131-120000
      hvdkit explain timeline.json profile --json

    Exit status: 0 success, whatever was found; 1 nothing of a job can be read there; 2 for bad usage.
    """
    found = explanation(paths)
    Page(lines(found)).print(form, found)
    return 0


def lines(found: Explanation) -> list[str]:
    """What is printed."""
    if not found.causes and found.stalled is None:
        first = [NOTHING_FOUND if found.steps else "No cause of lost time was found."]
    else:
        first = [] if found.stalled is None else [found.stalled]
        for cause in found.causes[:1]:
            first += [cause.sentence(), f"  Seen in {cause.evidence}", f"  {cause.advice}"]
    further = [f"Also: {cause.sentence()} {cause.advice}" for cause in found.causes[1 : 1 + _FURTHER]]
    left = len(found.causes) - 1 - _FURTHER
    untold = [f"Not told: {sentence}" for sentence in found.untold[:_UNTOLD]]
    more = [f"{count_text(left, 'smaller cause')} {'is' if left == 1 else 'are'} in --json."] if left > 0 else []
    read = ", ".join(f"{one.what} ({one.says})" for one in found.read)
    step = "" if found.step_s is None else f"; a step takes {duration_text(1e6 * found.step_s)}"
    accounts = []
    if found.accounts:
        whole = sum(found.accounts.values()) or 1.0
        parts = sorted(found.accounts.items(), key=lambda part: -part[1])
        words = ", ".join(f"{name} {share_text(seconds / whole)}" for name, seconds in parts if seconds >= 0.01 * whole)
        shown = found.causes[: 1 + _FURTHER]
        explained = sum((found.steps or 0) * cause.lost_s if cause.per_step else cause.lost_s for cause in shown)
        named = f"the causes above explain {share_text(min(1.0, explained / whole))}" if shown else "no cause named"
        accounts = [f"Of {duration_text(1e6 * whole)}: {words}; {named}."]
    room = LINES - len(first) - len(further) - len(more) - len(accounts) - 1
    said = [*first, *further, *more, *accounts, *untold[:room], f"Read: {read}{step}."]
    return [printable(line) for line in said]
