"""The measurements as one HTML page that needs nothing else: no network, no server, no script."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.common.extras import of_extra
from hvdkit.common.files import replacing
from hvdkit.common.units import bytes_text, duration_text, printable
from hvdkit.measure.emulate import plots, tables
from hvdkit.measure.emulate.analysis import Analysis
from hvdkit.measure.emulate.facts import flat
from hvdkit.measure.emulate.results import Results

with of_extra("report", "The report of hvdkit emulate is written with jinja2"):
    import jinja2

_STYLE = Path(hvdkit.__file__).parent / "read" / "timeline" / "templates" / "report.css"
"""The style sheet of all reports."""
_PLAN_ROWS = 200


def write_report(path: Path, results: Results, analysis: Analysis) -> None:
    """Write the page, completely or not at all.

    Raises:
        DataError, InvalidArgumentError: it cannot be written.
    """
    with replacing(path) as file:
        file.write(render(results, analysis).encode("utf-8", "replace"))


def render(results: Results, analysis: Analysis) -> str:
    """The page as text. What came from a file is text on it, and a Content-Security-Policy allows no script."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvdkit.measure.emulate"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    style = _STYLE.read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        version=hvdkit.__version__,
        style=style,
        style_hash="sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        title=f"{analysis.asked.collective} on {analysis.asked.ranks} ranks",
        subtitle=f"Replayed without the model: {printable(results.plan.source)}; {tables.trials_text(results.plan)}.",
        facts=_facts(results, analysis),
        notes=[printable(note) for note in analysis.notes],
        cdf=_image(plots.cdf, results, analysis),
        delays=_image(plots.delays, results, analysis),
        band=f"{100 * analysis.cdf_band:.2g}",
        grids=tables.grids(analysis),
        plan=[
            (printable(one.name), one.dtype, one.elements, one.nbytes, f"{1000 * one.gap_s:.4g}")
            for one in results.plan.collectives[:_PLAN_ROWS]
        ],
        plan_left_out=max(0, len(results.plan.collectives) - _PLAN_ROWS),
        environment=[(printable(name), printable(value)) for name, value in _settings(results).items()],
    )


def _settings(results: Results) -> dict[str, str]:
    return {**flat(results.asked), **flat(results.environment)}


def _facts(results: Results, analysis: Analysis) -> list[tuple[str, str, str]]:
    """Label, value and note of the numbers at the top."""
    whole = analysis.overall
    facts = [
        ("Delay (p50)", _duration(whole.slowest.p50.value), f"longest {_duration(whole.slowest.max)}"),
        ("Collectives", str(whole.slowest.count), f"{len(results.plan.collectives)} per step, {analysis.trials} steps"),
        ("Bytes per step", bytes_text(results.plan.nbytes), f"{len(analysis.rows)} sizes"),
    ]
    if analysis.step is not None:
        facts.append(("Step (p50)", _duration(analysis.step.p50.value), analysis.step_is))
    facts += [
        ("Skew (p50)", _duration(whole.skew.p50.value), "from the first rank's arrival to the last one's"),
        ("Transfer (p50)", _duration(whole.transfer.p50.value), "from the last rank's arrival on"),
    ]
    if whole.busbw is not None and whole.algbw is not None:
        note = f"algorithm {bytes_text(whole.algbw.value)}/s; all bytes by all transfer times"
        facts.append(("Bus bandwidth", f"{bytes_text(whole.busbw.value)}/s", note))
    facts.append(("Outliers", str(len(analysis.outliers)), ""))
    return facts


def _duration(seconds: float) -> str:
    return duration_text(1e6 * seconds)


def _image(draw: Any, results: Results, analysis: Analysis) -> str:
    """A plot as the address of an image that is inside the page."""
    file = io.BytesIO()
    draw(file, "svg", results, analysis)
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
