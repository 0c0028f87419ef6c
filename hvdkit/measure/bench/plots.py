"""Speed-up and efficiency as a picture in a file of its own: SVG, or PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from hvdkit.common import plot
from hvdkit.common.drawing import Figure, Line, Mark, Rect, Text, Upright
from hvdkit.common.extras import of_extra
from hvdkit.common.files import replacing
from hvdkit.errors import DataError
from hvdkit.measure.bench import figures
from hvdkit.measure.bench.analysis import Analysis

FORMATS = (".svg", ".png")
_INK = "#1a1a1a"
_LINES: dict[str, dict[str, Any]] = {
    "grid": {"color": "#e6e6e6", "linewidth": 0.8},
    "rule": {"color": "#777777", "linewidth": 0.8},
    "ideal": {"color": "#d55e00", "linewidth": 1.2, "linestyle": (0, (5, 4))},
    "through": {"color": "#0072b2", "linewidth": 1.0, "alpha": 0.5},
    "error": {"color": "#0072b2", "linewidth": 1.2},
}
"""As ``templates/figures.css`` says it, for the other painter."""
_BOXES = {"point": "#0072b2", "crowded": "#ffffff"}
_DOTS_PER_UNIT = 2.0


def write(analysis: Analysis, path: Path, *sources: Path) -> None:
    """Draw speed-up and efficiency to a file, completely or not at all.

    Args:
        analysis: what was found.
        path: the file, whose name ends in .svg or .png.
        sources: what was read, which ``path`` must not be.
    Raises:
        DataError: nothing was measured, or the file cannot be written.
        InvalidArgumentError: another ending, or jinja2 is missing, which SVG needs.
        MissingFrameworkError: matplotlib is missing, which PNG needs.
    """
    plot.check(path, FORMATS)
    found = [figures.speedup(analysis), figures.efficiency(analysis)]
    drawn = [figure for figure in found if figure is not None]
    if not drawn:
        raise DataError("nothing can be drawn: no job counts; measure with `hvdkit bench scaling` first.")
    whole = figures.stacked(drawn, f"{analysis.mode.capitalize()} scaling")
    content = svg(whole) if path.suffix.lower() == ".svg" else png(whole)
    with replacing(path, *sources) as file:
        file.write(content)


def svg(figure: Figure) -> bytes:
    """The figure as an SVG document that needs nothing else (SVG 1.1)."""
    from hvdkit.common import render

    template = render.environment("hvdkit.measure.bench").get_template("plot.svg.j2")
    style = render.resource("hvdkit.measure.bench", "figures.css") + plot.DARK
    return template.render(figure=figure, style=style).encode()


def png(figure: Figure) -> bytes:
    """The same marks, painted by matplotlib."""
    with of_extra("report", "a PNG is drawn with Matplotlib", ", or draw an .svg"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    canvas = Canvas(figsize=(figure.width / 72, figure.height / 72), dpi=72 * _DOTS_PER_UNIT)
    FigureCanvasAgg(canvas)
    axes = canvas.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, figure.width)
    axes.set_ylim(figure.height, 0)
    axes.axis("off")
    for mark in figure.marks:
        _paint(axes, mark)
    content = io.BytesIO()
    canvas.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _paint(axes: Any, mark: Mark) -> None:
    if isinstance(mark, Line):
        axes.plot([mark.x1, mark.x2], [mark.y1, mark.y2], **_LINES[mark.style])
    elif isinstance(mark, Rect):
        from matplotlib.patches import Rectangle

        face = _BOXES[mark.style]
        axes.add_patch(
            Rectangle((mark.x, mark.y), mark.width, mark.height, facecolor=face, edgecolor="#0072b2", zorder=5)
        )
    elif isinstance(mark, Upright):
        axes.text(mark.x, mark.y, mark.text, rotation=90, ha="center", va="center", fontsize=10, color=_INK)
    elif isinstance(mark, Text):
        words = mark.style.split()
        align = "right" if "end" in words else "center" if "middle" in words else "left"
        size = 9 if "small" in words else 10
        axes.text(mark.x, mark.y, mark.text, ha=align, va="baseline", fontsize=size, color=_INK)
