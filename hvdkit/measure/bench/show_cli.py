"""``hvdkit bench show``, and the forms in which results are printed."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common.commands import FILE, PATH, with_options
from hvdkit.common.extras import require_scipy
from hvdkit.measure.bench import plots, results, tables
from hvdkit.measure.bench.analysis import Analysis, analyse

FORMS = (
    click.option("--markdown", "form", flag_value="markdown", help="Print Markdown."),
    click.option("--csv", "form", flag_value="csv", help="Print CSV, a line for each number of ranks."),
    click.option("--json", "form", flag_value="json", help="Print JSON: the summary of the file."),
)


NEEDS_SCIPY = "hvdkit bench fits the laws of scaling"


def show_analysis(analysis: Analysis, form: str | None) -> None:
    """Print an analysis in one of ``FORMS``."""
    tables.page(analysis).print(form, analysis, lambda: tables.comma_separated(analysis))


@click.command()
@click.argument("file", type=FILE)
@with_options(FORMS)
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE.svg|.png|.pdf",
    help="Draw speed-up and efficiency with their intervals and the ideal.",
)
def show(file: Path, form: str | None, plot: Path | None) -> int:
    """Print the results that `hvdkit bench scaling` wrote to FILE; nothing is run.

    \b
    Examples:
      hvdkit bench show results.json --markdown >> README.md
      hvdkit bench show results.json --plot scaling.svg

    Exit status: 0 success, 1 FILE is something else or the plot cannot be drawn, 2 for bad usage.
    """
    require_scipy(NEEDS_SCIPY)
    analysis = analyse(results.read(file))
    if plot is not None:
        plots.write(analysis, plot, file)
    show_analysis(analysis, form)
    if plot is not None:
        click.echo(f"hvdkit bench: drawn to {plot}", err=True)
    return 0
