"""What was measured as one HTML page that needs nothing else: no network, no server, no library, no script.

Everything that came from the file is text on the page: the template escapes it, and a Content-Security-Policy allows
the one style sheet by its hash and nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hvdkit.common import plot, render
from hvdkit.common.causes import dearest_first
from hvdkit.common.drawing import shown_name
from hvdkit.common.intervals import Estimate
from hvdkit.common.render import Fact
from hvdkit.common.units import interval_text, printable, ranks_text
from hvdkit.measure.bench import plots, tables
from hvdkit.measure.bench.analysis import ScalingRow, ScalingSummary, analyse, otherwise
from hvdkit.measure.bench.results import MeasuredJob, ScalingResults
from hvdkit.measure.bench.subject import HowLaunched

_JOBS = 200
"""How many jobs are listed."""


def render_report(results: ScalingResults, name: str) -> str:
    """The page as text; its size is bounded by the numbers of ranks and ``_JOBS``.

    Args:
        results: what was measured.
        name: of the file, for the heading.
    """
    analysis = analyse(results)
    own = render.resource("hvdkit.measure.bench", "page.css")
    style = render.resource("hvdkit.read.timeline", "report.css") + own
    return render.page(
        "hvdkit.measure.bench",
        style,
        title=f"Scaling of {shown_name(' '.join(results.asked.command))}",
        subtitle=f"{analysis.mode.capitalize()} scaling, measured by hvdkit bench; from {shown_name(name)}.",
        verdict=_verdict(analysis),
        facts=_facts(results, analysis),
        notes=[printable(note) for note in analysis.notes],
        curves=_curves(analysis),
        parts=_parts(analysis),
        tables=tables.tables(analysis),
        sources=[(fit.name, fit.source) for fit in analysis.fits],
        jobs=[_job_row(number, job) for number, job in enumerate(results.jobs[:_JOBS], start=1)],
        jobs_left_out=max(0, len(results.jobs) - _JOBS),
        launches=[_launch(launch) for launch in results.launches],
        environment=_environment(results),
    )


def _curves(analysis: ScalingSummary) -> list[dict[str, str]]:
    """What is seen, and the image."""
    rows = plots.measured(analysis)
    if not rows:
        return []
    drawn = (("Speed-up", "speedup", plots.speedup), ("Efficiency", "efficiency", plots.efficiency))
    return [
        {"alt": f"{title}: {plots.said(rows, name)}.", "image": plot.image(partial(draw, analysis=analysis))}
        for title, name, draw in drawn
    ]


def _parts(analysis: ScalingSummary) -> str:
    """The image of the parts of a step; "" where none is known."""
    count = len(plots.with_parts(analysis))
    return plot.image(partial(plots.parts, analysis=analysis), size=(9, 1.2 + 0.35 * count)) if count else ""


def _facts(results: ScalingResults, analysis: ScalingSummary) -> list[Fact]:
    asked, environment = results.asked, results.environment
    failed = sum(job.failure is not None for job in results.jobs)
    measured = plots.measured(analysis)
    facts = [
        Fact("Ranks", ", ".join(map(str, asked.ranks)), f"{environment.cores} usable cores"),
        Fact("Jobs", str(len(results.jobs)), f"{failed} failed; {asked.repeats} repeats at each number of ranks"),
        Fact("Measured", analysis.measure or "nothing", f"without the first {asked.warmup_steps} steps of each job"),
    ]
    for name, best, found in _best(measured):
        crowded = "with more ranks than cores" if best.oversubscribed else "median with its 95% interval"
        facts.append(Fact(f"{name} on {best.ranks}", interval_text(found), crowded))
    commit = environment.commit
    if commit is not None:
        note = "files were changed since" if commit.changed else "of the script's repository, unchanged"
        facts.append(Fact("Commit", printable(commit.id)[:12], note))
    return facts


def _verdict(analysis: ScalingSummary) -> str:
    found = _best(plots.measured(analysis))
    said = ", ".join(f"{name.lower()} {interval_text(value)}" for name, _, value in found)
    speed = (
        f"On {ranks_text(found[0][1].ranks)}: {said}." if found else "No speed-up can be told from what was measured."
    )
    dearest = dearest_first(analysis.causes)
    return printable(f"{speed} {f'{dearest[0].sentence()} {dearest[0].advice}' if dearest else otherwise(analysis)}")


def _best(measured: list[ScalingRow]) -> list[tuple[str, ScalingRow, Estimate]]:
    """The speed-up and the efficiency on the most ranks."""
    found = [(row, {"Speed-up": row.speedup, "Efficiency": row.efficiency}) for row in measured[-1:]]
    return [(name, row, value) for row, values in found for name, value in values.items() if value is not None]


def _environment(results: ScalingResults) -> list[tuple[str, str]]:
    environment = results.environment
    packages = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    rows = [(name, getattr(environment, name)) for name in ("hvdkit", "python", "system", "cores")]
    rows += [("packages", packages), ("options of hvdkit launch", " ".join(results.asked.options) or "none")]
    return [(name, printable(str(value))) for name, value in rows]


def _launch(launch: HowLaunched) -> dict[str, Any]:
    settings = []
    for setting in launch.settings:
        words = [*setting.words, *(f"{name}={value}" for name, value in setting.variables.items())]
        settings.append((shown_name(" ".join(words)), shown_name(setting.why)))
    threads = "" if launch.threads is None else f", OMP_NUM_THREADS={launch.threads}"
    return {"title": printable(f"{ranks_text(launch.ranks)}: {launch.launcher}{threads}"), "settings": settings}


def _job_row(number: int, job: MeasuredJob) -> tuple[str, ...]:
    step = "" if job.steps is None else f"{1000 * job.steps.step_s:.4g}"
    closing = "" if job.closing_s is None else f"{job.closing_s:.4g}"
    said = "" if job.failure is None else f"failed: {printable((job.failure.splitlines() or [''])[0])}"
    return (str(number), str(job.ranks), str(job.repeat + 1), f"{job.wall_s:.3g}", step, closing, said)
