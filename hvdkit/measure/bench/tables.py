"""What was found: as tables, and as the lines of a CSV file."""

from __future__ import annotations

from hvdkit.common import table
from hvdkit.common.causes import verdict
from hvdkit.common.table import Page, Table
from hvdkit.common.units import change_text, interval_text, number_text
from hvdkit.measure.bench.accounting import ACTIVITIES, EXPOSED, WHOLE, Accounting, StepWindow
from hvdkit.measure.bench.analysis import ScalingRow, ScalingSummary, otherwise
from hvdkit.measure.bench.laws import Fit
from hvdkit.measure.bench.measurement import Parts
from hvdkit.measure.bench.results import STEPS

_PARTS = ("ranks", "step ms", "input", "compute", "communication", "wait", "start-up s", "first step s")
_ACTIVITIES = tuple(name.replace("_", " ") for name in ACTIVITIES)


def page(analysis: ScalingSummary) -> Page:
    """The verdict, the tables and the notes; CSV has a line for each number of ranks."""
    parts: list[str | Table] = [*verdict(analysis.causes, otherwise(analysis)), *tables(analysis)]
    return Page(parts, analysis.notes, [_csv_row(row) for row in analysis.rows])


def _csv_row(row: ScalingRow) -> dict[str, object]:
    found: dict[str, object] = {name: getattr(row, name) for name in ("ranks", "repeats", "failed")}
    found["oversubscribed"] = int(row.oversubscribed)
    for name in ("seconds", "speedup", "efficiency"):
        found |= table.ends(name, getattr(row, name))
    found |= {name: getattr(row, name) for name in ("step_s", "startup_s", "first_step_s")}
    found |= {f"{name}_s": getattr(row.parts, name, None) for name in ("input", "compute", "communication", "wait")}
    found |= {f"slowest_{name}": getattr(row.slowest, name, None) for name in ("rank", "share")}
    found["timeline_step_s"] = getattr(row.recorded, "timeline_step_s", None)
    windows = () if row.recorded is None else row.recorded.windows
    exposed = next((one.activities for one in windows if one.name == EXPOSED), {})
    return found | {f"exposed_{name}_s": exposed.get(name) for name in ACTIVITIES}


def tables(analysis: ScalingSummary) -> list[Table]:
    """How it scales, where a step goes, what Horovod did meanwhile and the fitted laws, as far as they are known."""
    seconds = "step ms" if analysis.mode == "weak" and analysis.measure == STEPS else "seconds"
    factor = 1000 if seconds == "step ms" else 1
    title = f"{analysis.mode.capitalize()} scaling, by {_measure(analysis)}; medians with 95% intervals"
    names = ("ranks", "repeats", seconds, "speed-up", "efficiency")
    found = [Table(title, names, [_row(row, factor) for row in analysis.rows])]
    parts = [(row, row.parts) for row in analysis.rows if row.parts is not None]
    if parts:
        inside = any(one.communication is None for _, one in parts)
        what = "compute holds communication and wait for ranks that were slow inside a step" if inside else "mean ms"
        found.append(Table(f"Where a step goes ({what})", _PARTS, [_part_row(*one) for one in parts]))
    recorded = [(row.ranks, row.recorded) for row in analysis.rows if row.recorded is not None]
    if recorded:
        title = "What Horovod did meanwhile (ms of a step of rank 0; one more job at each N, with a timeline)"
        recording = ("ranks", "rank 0 is", "ms", *_ACTIVITIES)
        lines = [words for one in recorded for words in _recorded_rows(*one)]
        found.append(Table(title, recording, lines, left=("rank 0 is",)))
    if analysis.fits:
        columns = ("fit", "parameters", "residuals")
        found.append(Table("Fitted laws", columns, [_fit_row(fit) for fit in analysis.fits], left=columns))
    return found


def _measure(analysis: ScalingSummary) -> str:
    if not analysis.measure:
        return "nothing, since no job counts"
    if analysis.measure != STEPS:
        return "the closing line"
    return "the time of a step" if analysis.mode == "weak" else "the time of all steps"


def _row(row: ScalingRow, factor: float) -> list[object]:
    repeats = f"{row.repeats} ({row.failed} failed)" if row.failed else row.repeats
    seconds = None if row.seconds is None else interval_text(row.seconds.scaled(factor))
    words = [None if estimate is None else interval_text(estimate) for estimate in (row.speedup, row.efficiency)]
    return [f"{row.ranks}*" if row.oversubscribed else row.ranks, repeats, seconds, *words]


def _part_row(row: ScalingRow, parts: Parts) -> list[object]:
    steps = (row.step_s, parts.input, parts.compute, parts.communication, parts.wait)
    return [
        row.ranks,
        *(None if seconds is None else _ms(seconds, 4) for seconds in steps),
        *(None if seconds is None else f"{seconds:.3g}" for seconds in (row.startup_s, row.first_step_s)),
    ]


def _recorded_rows(ranks: int, recorded: Accounting) -> list[list[object]]:
    """A line for each part of the step, and one for the whole."""
    found = list(recorded.windows)
    if len(found) > 1:
        together = {name: sum(one.activities[name] for one in found) for name in ACTIVITIES}
        found.append(StepWindow(WHOLE, recorded.step_s, together))
    return [
        [ranks, one.name, _ms(one.seconds, 4), *(_ms(one.activities[name]) for name in ACTIVITIES)] for one in found
    ]


def _ms(seconds: float, digits: int = 3) -> str:
    """Milliseconds with so many digits."""
    return "0" if 0 <= seconds < 5e-8 else number_text(1000 * seconds, digits)


def _fit_row(fit: Fit) -> list[str]:
    parameters = ", ".join(f"{name} {interval_text(estimate)}" for name, estimate in fit.parameters.items())
    residuals = ", ".join(f"{n}: {change_text(residual)}" for n, residual in fit.residuals.items())
    return [f"{fit.name}: {fit.formula}", parameters, residuals]
