"""``hvdkit emulate show``."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common.commands import FILE, with_options
from hvdkit.measure.emulate import outputs, results, tables
from hvdkit.measure.emulate.analysis import analyse


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
    found = results.read(file)
    analysis = analyse(found)
    outputs.write_all(found, analysis, files)
    if form == "samples":
        click.echo(tables.samples_csv(found), nl=False)
    else:
        tables.page(analysis).print(form, analysis, lambda: tables.comma_separated(analysis))
    return 0
