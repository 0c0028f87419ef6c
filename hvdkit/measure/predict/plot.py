"""Efficiency over the number of ranks, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdkit.common.extras import of_extra
from hvdkit.common.files import replacing
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.predict.prediction import Row

FORMS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Find out before anything is computed whether there is such a figure.

    Raises:
        InvalidArgumentError: the path ends with none of ``FORMS``.
    """
    if path.suffix.lower() not in FORMS:
        raise InvalidArgumentError(f"the plot is {path.name!r}; expected a name that ends with {', '.join(FORMS)}.")


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write the figure; an older one stays whole until the new one is complete.

    Args:
        path: ends with one of ``FORMS``.
        rows: with an efficiency.
    Raises:
        InvalidArgumentError: another ending.
        MissingFrameworkError: Matplotlib is not installed.
        DataError: it cannot be written.
    """
    check(path)
    with of_extra("report", "--plot draws with Matplotlib"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    known = [(row.ranks, row.efficiency) for row in rows if row.efficiency is not None]
    ranks = [n for n, _ in known]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(
        ranks,
        [one.value if one.low is None else one.low for _, one in known],
        [one.value if one.high is None else one.high for _, one in known],
        alpha=0.25,
        label="95 % interval",
    )
    axes.plot(ranks, [one.value for _, one in known], marker="o", label="predicted")
    axes.set(xscale="log", xlabel="ranks", ylabel="efficiency", ylim=(0, 1.05))
    axes.legend()
    form = path.suffix[1:].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)  # the same rows give the same file
    with replacing(path) as file, rc_context({"svg.hashsalt": "hvdkit"}):
        figure.savefig(file, format=form, metadata=undated)
