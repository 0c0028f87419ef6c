"""``hvdkit bench report``."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common.commands import FILE, PATH
from hvdkit.common.extras import require_scipy
from hvdkit.measure.bench import results, show_cli


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
    require_scipy(show_cli.NEEDS_SCIPY)
    from hvdkit.common import render
    from hvdkit.measure.bench.report import render_report

    found = results.read(file)
    render.write(output, lambda: render_report(found, file.name), file)
    click.echo(f"{output}: {output.stat().st_size / 1000:.0f} kB")
    return 0
