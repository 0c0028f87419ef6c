"""The command ``hvdkit timeline report``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1, PATH, with_options
from hvdkit.read.timeline.lanes import OPERATIONS, TENSORS
from hvdkit.read.timeline.options import OF_THE_JOB
from hvdkit.read.timeline.reader import read


@click.command()
@click.argument("file", type=PATH)
@click.option("-o", "output", type=PATH, required=True, metavar="HTML", help="The page to write.")
@click.option("--since", type=float, metavar="SECONDS", help="Show operation by operation from this time on.")
@click.option("--until", type=float, metavar="SECONDS", help="Show operation by operation up to this time.")
@click.option("--step", type=AT_LEAST_0, metavar="K", help="Show this training step, from 0  [default: usual steps]")
@click.option("--top", type=AT_LEAST_1, default=TENSORS, metavar="N", help="Tensors to list.")
@click.option(
    "--operations",
    type=click.IntRange(min=1, max=200_000),
    default=OPERATIONS,
    metavar="N",
    help="Operations that the page holds.",
)
@with_options(OF_THE_JOB)
def report(file: Path, output: Path, **shown: Any) -> int:
    """Write one HTML page about a recording, which opens from disk and loads nothing.

    It holds the summary, what to try, the time of each step, the phases of each tensor, and the sizes and durations of
    collectives. These are about the whole recording. A part of it is shown operation by operation, to zoom into.

    \b
    Examples:
      hvdkit timeline report timeline.json -o report.html
      hvdkit timeline report timeline.json.gz -o report.html --step 20
      hvdkit timeline report timeline.json -o report.html --since 60 --until 61.5

    Exit status: 0 success, 1 no operation of Horovod in it, 2 for bad usage or no such file.
    """
    from hvdkit.common import render
    from hvdkit.read.timeline.report import render_report

    recording = read(file)
    render.write(output, lambda: render_report(recording, **shown), file)
    click.echo(f"{output}: {output.stat().st_size / 1000:.0f} kB")
    return 0
