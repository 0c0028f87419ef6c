"""``hvdkit bench show``, and the forms in which results are printed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from rich.console import Console

from hvdkit.common import json_files
from hvdkit.common.extras import of_extra
from hvdkit.measure.bench import results, tables
from hvdkit.measure.bench.analysis import Analysis, analyse

FORMS = (
    click.option("--markdown", "form", flag_value="markdown", help="Print Markdown."),
    click.option("--csv", "form", flag_value="csv", help="Print CSV, a line for each number of ranks."),
    click.option("--json", "form", flag_value="json", help="Print JSON: the summary of the file."),
)
WIDTH = 140
"""Columns of what is not printed to a terminal: enough for all tables in full."""
PLOTS = (".svg", ".png")


def require_scipy() -> None:
    """Say what is missing before anything runs.

    Raises:
        MissingFrameworkError: SciPy is not installed.
    """
    with of_extra("bench", "hvdkit bench fits the laws of scaling with SciPy"):
        import scipy.optimize  # noqa: F401


def text(analysis: Analysis, form: str | None) -> str:
    """An analysis as "json", "csv", "markdown" or, with None, as tables for a terminal."""
    if form == "json":
        return json_files.encode(analysis)
    if form == "csv":
        return tables.comma_separated(analysis)
    if form == "markdown":
        return tables.markdown(analysis) + "\n"
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, markup=False, width=None if known else WIDTH)
    with console.capture() as captured:
        tables.show(analysis, console)
    return captured.get()


def _plot(_ctx: click.Context, _parameter: click.Parameter, file: Path | None) -> Path | None:
    if file is not None and file.suffix.lower() not in PLOTS:
        raise click.BadParameter(f"expected a name that ends in {' or '.join(PLOTS)}, got {str(file)!r}")
    return file


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@FORMS[0]
@FORMS[1]
@FORMS[2]
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    callback=_plot,
    metavar="FILE.svg|.png",
    help="Draw speed-up and efficiency with their intervals and the ideal.",
)
def show(file: Path, form: str | None, plot: Path | None) -> int:
    """Print what `hvdkit bench scaling` wrote to FILE; nothing is run.

    \b
    Examples:
      hvdkit bench show results.json --markdown >> README.md
      hvdkit bench show results.json --plot scaling.svg

    Exit status: 0 success, 1 FILE is something else or the plot cannot be drawn, 2 for bad usage.
    """
    require_scipy()
    analysis = analyse(results.read(file))
    if plot is not None:
        from hvdkit.measure.bench import plots

        plots.write(analysis, plot, file)
    click.echo(text(analysis, form), nl=False)
    if plot is not None:
        click.echo(f"hvdkit bench: drawn to {plot}", err=True)
    return 0
