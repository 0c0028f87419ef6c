"""The commands ``hvdkit trace summary`` and ``hvdkit timeline merge``, which stands on both."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common.commands import AT_LEAST_0, PATH
from hvdkit.common.table import Page, Table
from hvdkit.common.units import share_text
from hvdkit.read.trace import show
from hvdkit.read.trace.merging import merge as merge_files
from hvdkit.read.trace.summary import summarize


@click.command()
@click.argument("traces", nargs=-1, required=True, type=PATH, metavar="TRACE...")
@click.option("--top", type=AT_LEAST_0, default=15, metavar="N", help="Operators to list.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object, with all operators; times in seconds.")
def summary(traces: tuple[Path, ...], top: int, form: str | None) -> int:
    """Say what the steps of a training were spent on, from the traces of one rank or of all ranks of a run.

    A TRACE is a file, or a directory with one file for each rank. Computation is what GPU kernels do, or, without
    GPUs, the operators of the thread that trains; exposed is what no computation hides. A file that
    `hvdkit timeline merge` wrote has Horovod's exchanges in it, and they count.

    \b
    Examples:
      hvdkit trace summary profile
      hvdkit trace summary trace-0-of-2.json.gz trace-1-of-2.json.gz --json > summary.json

    Exit status: 0 success, 1 a file is no whole trace, 2 for bad usage, such as a file that is missing.
    """
    found = summarize(traces)
    show.summary_page(found, top).print(form, found)
    return 0


@click.command()
@click.argument("timeline", type=PATH)
@click.argument("trace", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, metavar="MERGED.json[.gz]", help="The file to write.")
@click.option("--offset-us", type=float, default=0, metavar="US", help="Microseconds to add to the times of TRACE.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object; times in seconds.")
def merge(timeline: Path, trace: Path, output: Path, offset_us: float, form: str | None) -> int:
    """Merge a timeline and a trace of torch.profiler on one time axis, and show how much communication is exposed.

    TRACE is what export_chrome_trace wrote on rank 0 in the same run. Exposed is the time in which a collective ran and
    nothing was computed: neither a GPU kernel nor, without GPUs, an operator of the training thread.

    \b
    Example:
      hvdkit timeline merge timeline.json trace.json -o merged.json

    Exit status: 0 success, 1 when a file cannot be used or the two cannot be aligned, 2 for bad usage.
    """
    overlap = merge_files(timeline, trace, output, offset_us=offset_us)
    rows = [
        (name, f"{value:.3f}", share_text(value / overlap.window))
        for name, value in (
            ("communication", overlap.communication),
            ("computation", overlap.computation),
            ("both at once", overlap.overlapped),
            ("exposed communication", overlap.exposed),
            ("neither", overlap.neither),
        )
    ]
    said = f"{output}: {overlap.operations} operations in {overlap.window:.3f} ms of both files"
    table = Table("", ("what", "ms", "share"), rows, ("what",), f"computation: {overlap.computed_by}")
    Page([said, table]).print(form, overlap)
    return 0
