"""The command ``hvdkit timeline report``."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.read.timeline.lanes import OPERATIONS, TENSORS
from hvdkit.read.timeline.options import of_the_job


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, metavar="HTML", help="The page to write.")
@click.option("--since", type=float, metavar="SECONDS", help="Show operation by operation from this time on.")
@click.option("--until", type=float, metavar="SECONDS", help="Show operation by operation up to this time.")
@click.option(
    "--step", type=click.IntRange(min=0), metavar="K", help="Show this training step, from 0  [default: usual steps]"
)
@click.option(
    "--top", type=click.IntRange(min=1), default=TENSORS, show_default=True, metavar="N", help="Tensors to list."
)
@click.option(
    "--operations",
    type=click.IntRange(min=1, max=200_000),
    default=OPERATIONS,
    show_default=True,
    metavar="N",
    help="Operations that the page holds.",
)
@of_the_job
def report(
    *,
    file: Path,
    output: Path,
    since: float | None,
    until: float | None,
    step: int | None,
    top: int,
    operations: int,
    ranks: int | None,
    fusion_threshold: int,
) -> int:
    """Write one HTML page about a recording, which opens from disk and loads nothing.

    It holds the summary, what to try, the time of each step, the phases of each tensor, the sizes and durations of
    collectives, and a part of the recording operation by operation, to zoom into. All else is about the whole of it.

    \b
    Examples:
      hvdkit timeline report timeline.json -o report.html
      hvdkit timeline report timeline.json.gz -o report.html --step 20
      hvdkit timeline report timeline.json -o report.html --since 60 --until 61.5

    Exit status: 0 success, 1 no operation of Horovod in it, 2 for bad usage or no such file.
    """
    from hvdkit.read.timeline.report import write_report

    page = write_report(
        file,
        output,
        since=since,
        until=until,
        step=step,
        top=top,
        operations=operations,
        ranks=ranks,
        fusion_threshold=fusion_threshold,
    )
    click.echo(f"{page}: {page.stat().st_size / 1000:.0f} kB")
    return 0
