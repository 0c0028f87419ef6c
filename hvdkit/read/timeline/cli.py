"""The command ``hvdkit timeline``: ``summary`` and ``report``; ``merge`` is in the room of traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdkit.common.commands import AT_LEAST_0, PATH, group_of, print_any_name
from hvdkit.common.files import replacing
from hvdkit.errors import DataError
from hvdkit.read.timeline import show
from hvdkit.read.timeline.reader import read
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


@click.command()
@click.argument("file", type=PATH)
@click.option("--since", type=float, metavar="SECONDS", help="Only what began so long after the first event, or later.")
@click.option("--until", type=float, metavar="SECONDS", help="Only what began before this time.")
@click.option("--top", type=AT_LEAST_0, default=10, metavar="N", help="Tensors to list.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object; times in seconds, sizes in bytes.")
def summary(file: Path, top: int, form: str | None, since: float | None, until: float | None) -> int:
    """Name what costs a job time and what to try, then show where the time went, in numbers.

    Steps are found from the tensors that are reduced again and again; the first step is shown apart. Communication
    is the time in which at least one collective ran: fused tensors, which Horovod writes once each, count once.

    \b
    Examples:
      hvdkit timeline summary timeline.json
      hvdkit timeline summary timeline.json.gz --top 3
      hvdkit timeline summary timeline.json --since 60 --json > summary.json

    Exit status: 0 success, 1 no operation of Horovod in it or in that part, 2 for bad usage or no such file.
    """
    found = summarize(file, since=since, until=until)
    if not found.operations:
        whole = summarize(file)
        if not whole.operations:
            raise nothing_in(file, found)
        raise DataError(
            f"no operation began in that part of {str(file)!r}, whose operations end at {whole.until / 1e6:.6g} s; "
            "choose others for --since and --until."
        )
    show.page(found, top).print(form, show.found_as(found))
    return 0


@click.command()
@click.argument("file", type=PATH)
@click.option("-o", "output", type=PATH, required=True, metavar="HTML", help="The page to write.")
@click.option("--since", type=float, metavar="SECONDS", help="Show operation by operation from this time on.")
@click.option("--until", type=float, metavar="SECONDS", help="Show operation by operation up to this time.")
@click.option("--step", type=AT_LEAST_0, metavar="K", help="Show this training step, from 0  [default: usual steps]")
def report(file: Path, output: Path, **shown: Any) -> int:
    """Write one HTML page about a recording, which opens from disk and loads nothing.

    It holds the summary, what to try, the time of each step and the phases of each tensor. These are about the whole
    recording. A part of it is shown operation by operation, to zoom into.

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
