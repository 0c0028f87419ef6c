"""The files that a run is turned into where they are asked for: plots and a report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hvdkit.common import plot as drawing
from hvdkit.common.files import is_directory
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate import plots
from hvdkit.measure.emulate.analysis import Analysis, analyse
from hvdkit.measure.emulate.results import Results


def check(
    *,
    plot: Path | None = None,
    size_plot: Path | None = None,
    report: Path | None = None,
    others: Sequence[Path] = (),
) -> None:
    """Find out before anything is measured whether these files can be written.

    Args:
        plot, size_plot, report: see ``write_all``.
        others: files that are read or written too, which none of these may take the place of.

    Raises:
        MissingFrameworkError: matplotlib or jinja2 is needed and not installed.
        InvalidArgumentError: a plot ends in none of ``plot.FORMATS``, a path is a directory or in one that is not there, or
            two of the files are one.
    """
    _check_apart([path for path in (plot, size_plot, report, *others) if path is not None])
    for path in (plot, size_plot, report):
        if path is None:
            continue
        if is_directory(path):
            raise InvalidArgumentError(f"The output {str(path)!r} is a directory; give the name of a file in it.")
        if not path.absolute().parent.is_dir():
            raise InvalidArgumentError(
                f"The directory of the output {str(path)!r} does not exist; make it, or give another path."
            )
        if path is not report:
            drawing.check(path)
    if plot or size_plot or report:
        drawing.require()
    if report is not None:
        import hvdkit.measure.emulate.report  # noqa: F401


def _check_apart(paths: Sequence[Path]) -> None:
    """None of them would be written over another one."""
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise InvalidArgumentError(f"The file {str(path)!r} is named for two things; give each a file of its own.")


def write_all(
    results: Results,
    *,
    plot: Path | None = None,
    size_plot: Path | None = None,
    report: Path | None = None,
    analysis: Analysis | None = None,
) -> None:
    """Write the files that are asked for, each completely or not at all.

    Args:
        results: with at least one sample.
        plot: the distribution of the delays.
        size_plot: the delays by size.
        report: an HTML page.
        analysis: of these results, where it is there already.
    Raises:
        MissingFrameworkError: matplotlib or jinja2 is needed and not installed.
        InvalidArgumentError: as in ``check``.
        DataError: there is no sample, or a file cannot be written.
    """
    check(plot=plot, size_plot=size_plot, report=report)
    if plot is None and size_plot is None and report is None:
        return
    found = analyse(results) if analysis is None else analysis
    for path, draw in ((plot, plots.cdf), (size_plot, plots.delays)):
        if path is not None:
            drawing.write(path, partial(draw, results=results, analysis=found))
    if report is not None:
        from hvdkit.measure.emulate.report import write_report

        write_report(report, results, found)
