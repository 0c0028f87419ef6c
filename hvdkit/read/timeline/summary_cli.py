"""The command ``hvdkit timeline summary``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdkit.common.commands import AT_LEAST_0, PATH, with_options
from hvdkit.errors import DataError
from hvdkit.read.timeline import show
from hvdkit.read.timeline.options import OF_THE_JOB
from hvdkit.read.timeline.summary import nothing_in, summarize


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
        _check_part(file)
        raise nothing_in(file, found)
    show.page(found, 10 if top is None else top).print(form, show.found_as(found, top))
    return 0


def _check_part(file: Path) -> None:
    """Raises DataError with where the operations are, if there are any outside the part asked for."""
    whole = summarize(file)
    if whole.operations:
        raise DataError(
            f"no operation began in that part of {str(file)!r}, whose operations lie between {whole.since / 1e6:.6g} s "
            f"and {whole.until / 1e6:.6g} s; choose others for --since, --until and --step."
        )
