"""The files that a run is turned into where they are asked for: plots and a report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from hvdkit.common import plot as drawing
from hvdkit.common.commands import PATH, output_file
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate import plots
from hvdkit.measure.emulate.analysis import EmulateSummary
from hvdkit.measure.emulate.results import EmulateResults

Files = Mapping[str, Path | None]
"""By name: ``plot``, the distribution of the delays; ``size_plot``, the delays by size; ``report``, an HTML page."""
OPTIONS = tuple(
    click.option(option, type=PATH, callback=output_file, metavar="FILE", help=what)
    for option, what in (
        ("--plot", "Draw the distribution of the delays (.svg, .png, .pdf)."),
        ("--size-plot", "Draw the delays by size (.svg, .png, .pdf)."),
        ("--report", "Write an HTML page."),
    )
)
"""What asks for ``Files``."""


def check(files: Files, other: Path | None) -> None:
    """Find out before anything is measured whether these files can be made.

    Args:
        files: those that are asked for.
        other: a file that is read or written too, which none of these may take the place of.
    Raises:
        MissingFrameworkError: matplotlib or jinja2 is needed and not installed.
        InvalidArgumentError: a plot ends in none of ``plot.FORMATS``, or two of the files are one.
    """
    wanted = {name: path for name, path in files.items() if path is not None}
    paths = [path for path in (*wanted.values(), other) if path is not None]
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise InvalidArgumentError(f"The file {str(path)!r} is named for two things; give each a file of its own.")
    for name, path in wanted.items():
        if name != "report":
            drawing.check(path)
    if wanted:
        drawing.require()
    if "report" in wanted:
        import hvdkit.measure.emulate.report  # noqa: F401


def write_all(results: EmulateResults, analysis: EmulateSummary, files: Files) -> None:
    """Write the files that are asked for, each completely or not at all.

    Args:
        results: with at least one sample.
        analysis: of these results.
        files: as in ``check``.
    Raises:
        DataError: a file cannot be written.
    """
    for name, draw in (("plot", plots.cdf), ("size_plot", plots.delays)):
        if (path := files.get(name)) is not None:
            drawing.write(path, partial(draw, results=results, analysis=analysis))
    if (page := files.get("report")) is not None:
        from hvdkit.common import render
        from hvdkit.measure.emulate import report

        render.write(page, lambda: report.render_report(results, analysis))
