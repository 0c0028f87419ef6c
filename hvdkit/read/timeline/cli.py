"""The command ``hvdkit timeline``: ``summary`` and ``report``; ``merge`` is in the room of traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdkit.common.allreduce import FUSION_BYTES
from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1, PATH, group_of, print_any_name, with_options
from hvdkit.common.files import replacing
from hvdkit.errors import DataError
from hvdkit.read.timeline import show
from hvdkit.read.timeline.reader import read
from hvdkit.read.timeline.show import OPERATIONS, TENSORS
from hvdkit.read.timeline.summary import nothing_in, summarize

SUBCOMMANDS = {
    "summary": ("hvdkit.read.timeline.cli:summary", "Where the time went, in numbers, and what to try."),
    "report": ("hvdkit.read.timeline.cli:report", "Write one HTML page, to zoom into."),
    "merge": ("hvdkit.read.trace.cli:merge", "Merge it with a trace of torch.profiler."),
}

_MOVED = {
    "diff": "hvdkit diff A B",
    "slice": "hvdkit timeline report FILE -o HTML --since S --until S",
    "export": "https://ui.perfetto.dev",
}


@click.group(cls=group_of(SUBCOMMANDS, moved=_MOVED))
def timeline() -> None:
    """Read a timeline of Horovod (HOROVOD_TIMELINE): where did the time go, and what to try?

    Reads any such file, also compressed with gzip, cut off or damaged. Rank 0 writes it:

    \b
      hvdkit launch -n 4 --timeline timeline.json -- python train.py
      hvdkit timeline summary timeline.json

    Each subcommand has its own --help with an example.
    """
    print_any_name()


OF_THE_JOB = (
    click.option("--ranks", type=AT_LEAST_1, metavar="N", help="Ranks of the job  [default: what the file says]"),
    click.option(
        "--fusion-threshold",
        type=AT_LEAST_0,
        default=FUSION_BYTES,
        metavar="BYTES",
        help="HOROVOD_FUSION_THRESHOLD of the job.",
    ),
)
"""Options about the job behind a recording, for ``summarize``."""


@click.command()
@click.argument("file", type=PATH)
@click.option("--since", type=float, metavar="SECONDS", help="Only what began so long after the first event, or later.")
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
    from hvdkit.read.timeline.report import render_report  # needs the extra

    recording = read(file)
    with replacing(output, file) as page:
        page.write(render_report(recording, **shown).encode("utf-8", "replace"))
    click.echo(f"{output}: {output.stat().st_size / 1000:.0f} kB")
    return 0
