"""``hvdkit bench show``, ``report`` and ``compare``, and the forms in which results are printed."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common import json_files
from hvdkit.common.commands import FILE, PATH, with_options
from hvdkit.common.extras import require_scipy
from hvdkit.common.table import Page
from hvdkit.common.units import ranks_text
from hvdkit.measure.bench import comparison, plots, side_by_side, tables
from hvdkit.measure.bench.analysis import analyse
from hvdkit.measure.bench.results import ScalingResults

FORMS = (
    click.option("--markdown", "form", flag_value="markdown", help="Print Markdown."),
    click.option("--csv", "form", flag_value="csv", help="Print CSV, a line for each number of ranks."),
    click.option("--json", "form", flag_value="json", help="Print JSON: the summary of the file."),
)


NEEDS_SCIPY = "hvdkit bench fits the laws of scaling"


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
    analysis = analyse(json_files.read(file, ScalingResults))
    if plot is not None:
        plots.write(analysis, plot, file)
    tables.page(analysis).print(form, analysis)
    if plot is not None:
        click.echo(f"hvdkit bench: drawn to {plot}", err=True)
    return 0


@click.command()
@click.argument("file", type=FILE)
@click.option("-o", "output", type=PATH, required=True, metavar="HTML", help="The page to write.")
def report(file: Path, output: Path) -> int:
    """Write the results of `hvdkit bench scaling` as one HTML page, which opens from disk and loads nothing.

    It holds the plots, the tables, every job, and where and how it was measured.

    \b
    Example:
      hvdkit bench report results.json -o report.html

    Exit status: 0 success, 1 FILE is something else or the page cannot be written, 2 for bad usage.
    """
    require_scipy(NEEDS_SCIPY)
    from hvdkit.common import render
    from hvdkit.measure.bench.report import render_report

    found = json_files.read(file, ScalingResults)
    render.write(output, lambda: render_report(found, file.name), file)
    click.echo(f"{output}: {output.stat().st_size / 1000:.0f} kB")
    return 0


@click.command()
@side_by_side.arguments
@side_by_side.fail_below("number of ranks")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
def compare(before: Path, after: Path, limit: float | None, form: str | None) -> int:
    """Compare two results of `hvdkit bench scaling`, number of ranks by number of ranks.

    The speed of B compared with A is above 1 where B is faster. Other differences (commit, versions,
    cores) are listed, too. With --fail-below it also fails where A has jobs that count and all jobs of B failed.

    \b
    Example, for continuous integration:
      hvdkit bench compare main.json branch.json --fail-below 0.95

    Exit status: 0; 1 when a speed is below --fail-below beyond noise, or a file cannot be used; 2 for bad usage.
    """
    first, second = (json_files.read(path, ScalingResults) for path in (before, after))
    compared = comparison.compare(first, second)
    slower = side_by_side.below(compared, limit)
    gone = [] if limit is None else comparison.unmeasured(first, second)
    notes = comparison.differences(first, second)
    below = tuple(one.ranks for one in slower)
    found = comparison.ScalingComparison(tuple(compared), tuple(notes), limit, below, tuple(gone))
    lines = [(str(one.ranks), f"On {ranks_text(one.ranks)}", one) for one in compared]
    shown = side_by_side.page(("ranks", "A, seconds", "B, seconds"), lines, limit, notes)
    Page([*shown.parts, *(f"On {ranks_text(n)}: no job of B counts, failed." for n in gone)]).print(form, found)
    return 1 if slower or gone else 0
