"""``hvdkit explain``."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common.table import Page
from hvdkit.read.explain.join import explain as explanation
from hvdkit.read.explain.results import lines


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="FILE|DIR...")
@click.option("--json", "form", flag_value="json", help="Print one JSON object; times in seconds.")
def explain(paths: tuple[Path, ...], form: str | None) -> int:
    """Name what costs a job most time: how much, the evidence and the fix, in at most ten lines.

    Reads the recordings of one job: the times of its steps, Horovod's timeline, PyTorch's traces, MPI profiles,
    stall reports, how it was launched. DIR stands for all of these in it. Causes are weighed by the time that they
    cost. Those below 2 % of it are not named.

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
