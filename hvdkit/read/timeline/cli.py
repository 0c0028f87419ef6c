"""The command ``hvdkit timeline``: a table of subcommands, each imported when it is used."""

from __future__ import annotations

import click

from hvdkit.common.commands import group_of, print_any_name

SUBCOMMANDS = {
    "summary": ("hvdkit.read.timeline.commands:summary", "Where the time went, in numbers, and what to try."),
    "report": ("hvdkit.read.timeline.commands:report", "Write one HTML page, to zoom into."),
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
