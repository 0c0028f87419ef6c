"""The commands ``hvdkit timeline summary``, ``report``, ``slice`` and ``export``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1, PATH, with_options
from hvdkit.common.table import Page
from hvdkit.errors import DataError
from hvdkit.read.timeline import show
from hvdkit.read.timeline.export import export as write_export
from hvdkit.read.timeline.lanes import OPERATIONS, TENSORS
from hvdkit.read.timeline.reader import read
from hvdkit.read.timeline.slicing import slice_timeline
from hvdkit.read.timeline.summary import FUSION_THRESHOLD, nothing_in, summarize

OF_THE_JOB = (
    click.option("--ranks", type=AT_LEAST_1, metavar="N", help="Ranks of the job  [default: what the file says]"),
    click.option(
        "--fusion-threshold",
        type=AT_LEAST_0,
        default=FUSION_THRESHOLD,
        metavar="BYTES",
        help="HOROVOD_FUSION_THRESHOLD of the job.",
    ),
)
"""Options about the job behind a recording, for ``summarize``."""


@click.command()
@click.argument("file", type=PATH)
@click.option("--since", type=float, metavar="SECONDS", help="Only what began at this time of the recording or later.")
@click.option("--until", type=float, metavar="SECONDS", help="Only what began before this time.")
@click.option("--step", type=AT_LEAST_0, metavar="K", help="Only what began in this training step, from 0.")
@click.option("--top", type=AT_LEAST_0, metavar="N", help="Tensors to list  [default: 10; all with --json]")
@with_options(OF_THE_JOB)
@click.option("--json", "form", flag_value="json", help="Print one JSON object; times in seconds, sizes in bytes.")
def summary(file: Path, top: int | None, form: str | None, **part: Any) -> int:
    """Name what costs a job time and what to try, then show where the time went, in numbers.

    Steps are found from the tensors that are reduced again and again; the first step is shown apart. Communication
    is the time in which at least one collective ran: fused tensors, which Horovod writes once each, count once.

    \b
    Examples:
      hvdkit timeline summary timeline.json
      hvdkit timeline summary timeline.json.gz --step 20 --top 3
      hvdkit timeline summary timeline.json --since 60 --json > summary.json

    Exit status: 0 success, 1 no operation of Horovod in it or in that part, 2 for bad usage or no such
    file.
    """
    found = summarize(file, **part)
    if not found.operations:
        whole = summarize(file)
        if not whole.operations:
            raise nothing_in(file, found)
        raise DataError(
            f"no operation began in that part of {str(file)!r}, whose operations lie between {whole.since / 1e6:.6g} s "
            f"and {whole.until / 1e6:.6g} s; choose others for --since, --until and --step."
        )
    show.page(found, 10 if top is None else top).print(form, show.found_as(found, top))
    return 0


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


def _steps(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:  # noqa: ARG001
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,12})(?:\.\.([0-9]{1,12}))?", value)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise click.BadParameter(f"expected A..B with A at most B, such as 100..119, or one step, got {value!r}.")
    return int(found[1]), int(found[2] or found[1])


@click.command("slice")
@click.argument("file", type=PATH)
@click.option(
    "--since", type=float, metavar="SECONDS", help="Keep operations that began at this time of the recording or later."
)
@click.option("--until", type=float, metavar="SECONDS", help="Keep operations that began before this time.")
@click.option(
    "--steps", callback=_steps, metavar="A..B", help="Keep training steps A to B, inclusive; the first one is 0."
)
@click.option("-o", "--output", type=PATH, required=True, metavar="OUT.json[.gz]", help="The file to write.")
@click.option("--json", "form", flag_value="json", help="Print what was written as one JSON object.")
def slice_(
    file: Path, since: float | None, until: float | None, steps: tuple[int, int] | None, output: Path, form: str | None
) -> int:
    """Write part of a timeline to its own file, for viewers that cannot open all of it.

    Operations that began in the part are kept whole, with the times that they have in the source.

    \b
    Examples:
      hvdkit timeline slice timeline.json --since 60 --until 70 -o minute.json
      hvdkit timeline slice timeline.json.gz --steps 100..119 -o steps.json.gz

    Exit status: 0 success, 1 nothing in that part, 2 for bad usage or no such file.
    """
    if since is None and until is None and steps is None:
        raise click.UsageError("Say which part: --since, --until or both, or --steps.")
    written = slice_timeline(file, output, since=since, until=until, steps=steps)
    end = "the end" if written.until is None else f"{written.until:g} s"
    said = f"{written.operations} operations, {written.events} events, from {written.since:g} s to {end}"
    Page([f"{written.path}: {said}"]).print(form, written)
    return 0


@click.command()
@click.argument("file", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, metavar="OUT.pftrace|OUT.csv", help="The file to write.")
@click.option("--json", "form", flag_value="json", help="Print what was written as one JSON object.")
def export(file: Path, output: Path, form: str | None) -> int:
    """Write a timeline for other programs: for Perfetto (https://ui.perfetto.dev), or a table.

    The output's suffix decides. .pftrace has a track for each tensor, with its negotiation below it, and one for
    the cycles. .csv has a row for each operation, with the microseconds of every phase. .gz may follow.

    \b
    Examples:
      hvdkit timeline export timeline.json -o timeline.pftrace
      hvdkit timeline export timeline.json -o operations.csv

    Exit status: 0 success, 1 no operation in it, 2 for bad usage or no such file.
    """
    written = write_export(file, output)
    Page([f"{written.path}: {written.operations} operations of {written.tensors} tensors"]).print(form, written)
    return 0
