"""``hvdkit emulate show`` and ``compare``."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common import json_files
from hvdkit.common.commands import FILE, with_options
from hvdkit.measure.bench import side_by_side
from hvdkit.measure.emulate import compare as comparing
from hvdkit.measure.emulate import outputs, tables
from hvdkit.measure.emulate.analysis import analyse
from hvdkit.measure.emulate.compare import SLOWEST, TRANSFER
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.emulate.tables import DIGITS


@click.command()
@click.argument("file", type=FILE)
@click.option("--markdown", "form", flag_value="markdown", help="Print Markdown.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV, a line for each size and one for all.")
@click.option("--samples", "form", flag_value="samples", help="Print CSV, a line for each collective measured.")
@click.option("--json", "form", flag_value="json", help="Print JSON: the analysis.")
@with_options(outputs.OPTIONS)
def show(file: Path, form: str | None, **files: Path | None) -> int:
    """Print the results of `hvdkit emulate --json FILE` again, or in another form; nothing is run.

    \b
    Examples:
      hvdkit emulate show results.json
      hvdkit emulate show results.json --markdown >> notes.md
      hvdkit emulate show results.json --plot cdf.svg --size-plot sizes.svg --report report.html

    Exit status: 0 success, 1 the file cannot be used, 2 for bad usage.
    """
    outputs.check(files, file)
    found = json_files.read(file, EmulateResults)
    analysis = analyse(found)
    outputs.write_all(found, analysis, files)
    if form == "samples":
        click.echo(tables.samples_csv(found), nl=False)
    else:
        tables.page(analysis).print(form, analysis)
    return 0


@click.command()
@side_by_side.arguments
@click.option(
    "--by",
    type=click.Choice([SLOWEST, TRANSFER]),
    default=SLOWEST,
    help="What is compared: the delay of the slowest rank, or the time from the last rank's arrival on.",
)
@side_by_side.fail_below("size")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
def compare(before: Path, after: Path, by: str, limit: float | None, form: str | None) -> int:
    """Compare two results of `hvdkit emulate`, size by size and for whole steps.

    The speed of B compared with A is above 1 where B is faster. Other differences (engine, ranks,
    versions) are listed, too.

    \b
    Examples:
      hvdkit emulate compare mpi.json ring.json
      hvdkit emulate compare before.json after.json --fail-below 0.95

    Exit status: 0; 1 when a speed is below --fail-below beyond noise, or a file cannot be used; 2 for bad usage.
    """
    first, second = (json_files.read(path, EmulateResults) for path in (before, after))
    compared = comparing.compare(first, second, by)
    slower = side_by_side.below(compared, limit)
    notes = comparing.differences(first, second)
    found = comparing.EmulateComparison(by, tuple(compared), tuple(notes), limit, tuple(one.name for one in slower))
    lines = [(one.name, "Whole steps" if one.nbytes is None else f"{one.nbytes} bytes", one) for one in compared]
    shown = side_by_side.page(("bytes", "A, ms", "B, ms"), lines, limit, notes, 1000, DIGITS)
    shown.print(form, found)
    return 1 if slower else 0
