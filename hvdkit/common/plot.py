"""Plots that Matplotlib draws, as files. The same numbers give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdkit.common.files import replacing
from hvdkit.errors import InvalidArgumentError, of_extra

FORMATS = (".svg", ".png", ".pdf")
SIZE = (7.2, 4.4)
"""Inches of a plot."""
DARK = "@media screen and (prefers-color-scheme: dark) { svg:root { filter: invert(1) hue-rotate(180deg); } }"
"""A rule of an SVG file: where its reader wants dark pages, black and white change places and colours stay."""
Draw = Callable[[Any], None]
_STYLE: Any = {"svg.hashsalt": "hvdkit", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def check(path: Path) -> None:
    """Raise InvalidArgumentError, before anything is computed, where the path ends with none of ``FORMATS``."""
    if path.suffix.lower() not in FORMATS:
        expected = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise InvalidArgumentError(f"The plot {str(path)!r} ends in {path.suffix!r}; expected {expected}.")


def require() -> None:
    """Raises MissingFrameworkError where Matplotlib is not installed."""
    with of_extra("report", "plots are drawn with Matplotlib"):
        import matplotlib.figure  # noqa: F401


def picture(form: str, *draws: Draw, size: tuple[float, float] = SIZE) -> bytes:
    """A plot, of ``size`` inches, as the content of a file.

    Args:
        form: one of ``FORMATS``.
        draws: each puts something on Matplotlib's axes of its own, below the one before.
    Raises:
        MissingFrameworkError: Matplotlib is not installed.
    """
    require()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        for draw, axes in zip(draws, figure.subplots(len(draws), squeeze=False)[:, 0], strict=True):
            draw(axes)
        figure.savefig(content, format=form[1:], dpi=150, metadata=_UNDATED.get(form))
    if form == ".svg":
        return content.getvalue().replace(b"<defs>", f"<style>{DARK}</style>\n <defs>".encode(), 1)
    return content.getvalue()


def write(path: Path, *draws: Draw, size: tuple[float, float] = SIZE, sources: Sequence[Path] = ()) -> None:
    """Write a ``picture`` to a file, completely or not at all; ``path`` must be none of ``sources``, what was read.

    Raises:
        InvalidArgumentError: it ends in none of ``FORMATS``, or is a directory or a source.
        DataError: it cannot be written.
    """
    check(path)
    content = picture(path.suffix.lower(), *draws, size=size)
    with replacing(path, *sources) as file:
        file.write(content)
