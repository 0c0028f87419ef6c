"""The measurements as one HTML page that needs nothing else: no network, no server, no script."""

from __future__ import annotations

from hvdkit.common import plot, render
from hvdkit.common.drawing import LONGEST_NAME
from hvdkit.common.render import Fact
from hvdkit.common.units import bytes_text, duration_text, printable
from hvdkit.measure.emulate import outputs, tables
from hvdkit.measure.emulate.analysis import EmulateSummary
from hvdkit.measure.emulate.results import EmulateResults

_PLAN_ROWS = 200


def render_report(results: EmulateResults, analysis: EmulateSummary) -> str:
    """The page as text. What came from a file is text on it, and a Content-Security-Policy allows no script."""
    style = render.resource("hvdkit.read.timeline", "report.css")
    return render.page(
        "hvdkit.measure.emulate",
        style,
        title=f"{analysis.asked.collective} on {analysis.asked.ranks} ranks",
        subtitle=f"Replayed without the model: {printable(results.plan.source)}; {tables.trials_text(results.plan)}.",
        verdict=_verdict(analysis),
        facts=_facts(results, analysis),
        notes=[printable(note) for note in analysis.notes],
        cdf=plot.image(lambda axes: outputs.cdf(axes, results, analysis)),
        delays=plot.image(lambda axes: outputs.delays(axes, results, analysis)),
        band=f"{100 * analysis.cdf_band:.2g}",
        tables=tables.tables(analysis),
        plan=tables.plan_table(
            results.plan.collectives[:_PLAN_ROWS],
            "The collectives of a step, in the order of their replay",
            longest=LONGEST_NAME,
        ),
        plan_left_out=max(0, len(results.plan.collectives) - _PLAN_ROWS),
        environment=[(printable(name), printable(value)) for name, value in results.settings().items()],
    )


def _verdict(analysis: EmulateSummary) -> str:
    whole = analysis.overall
    parts = ((whole.skew, "waiting for the last rank"), (whole.transfer, "transfer"))
    more = ", ".join(f"{_duration(one.p50.value)} {what}" for one, what in parts)
    return (
        f"Half of {whole.slowest.count} collectives took {_duration(whole.slowest.p50.value)} or more on the slowest "
        f"rank (medians: {more}), the longest {_duration(whole.slowest.max)}."
    )


def _facts(results: EmulateResults, analysis: EmulateSummary) -> list[Fact]:
    """The numbers at the top."""
    whole = analysis.overall
    facts = [
        Fact("Delay (p50)", _duration(whole.slowest.p50.value), f"longest {_duration(whole.slowest.max)}"),
        Fact(
            "Collectives",
            str(whole.slowest.count),
            f"{len(results.plan.collectives)} per step, {analysis.trials} steps",
        ),
        Fact("Bytes per step", bytes_text(results.plan.nbytes), f"{len(analysis.rows)} sizes"),
    ]
    if analysis.step is not None:
        facts.append(Fact("Step (p50)", _duration(analysis.step.p50.value), analysis.step_is))
    facts += [
        Fact("Skew (p50)", _duration(whole.skew.p50.value), "from the first rank's arrival to the last one's"),
        Fact("Transfer (p50)", _duration(whole.transfer.p50.value), "from the last rank's arrival on"),
    ]
    if whole.busbw is not None and whole.algbw is not None:
        note = f"algorithm {bytes_text(whole.algbw.value)}/s; all bytes by all transfer times"
        facts.append(Fact("Bus bandwidth", f"{bytes_text(whole.busbw.value)}/s", note))
    facts.append(Fact("Outliers", str(len(analysis.outliers)), ""))
    return facts


def _duration(seconds: float) -> str:
    return duration_text(1e6 * seconds)
