"""What was found, as a table for a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hvdkit.common.intervals import Estimate
from hvdkit.common.units import printable
from hvdkit.measure.bench.accounting import ACTIVITIES, EXPOSED, WHOLE, Window
from hvdkit.measure.bench.analysis import Analysis, Row
from hvdkit.measure.bench.laws import Fit
from hvdkit.measure.bench.results import STEPS

_PARTS = ("ranks", "step ms", "input", "compute", "communication", "wait", "start-up s", "first step s")
_ACTIVITIES = tuple(name.replace("_", " ") for name in ACTIVITIES)
LEFT = ("fit", "rank 0 is")
"""Columns of text."""


def show(analysis: Analysis, console: Console) -> None:
    """Print it for a reader."""
    for title, names, rows in tables(analysis):
        console.print(title, style="bold", soft_wrap=True)  # as the table's own title it would be folded to its width
        table = Table()
        for name in names:
            table.add_column(name, justify="left" if name in LEFT else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in analysis.notes:
        console.print(f"- {readable(note)}", soft_wrap=True)


def markdown(analysis: Analysis) -> str:
    """The same tables in Markdown."""
    blocks = []
    for title, names, rows in tables(analysis):
        lines = [f"**{title}**", "", _line(names), _line(["---" if name in LEFT else "---:" for name in names])]
        blocks.append("\n".join([*lines, *map(_line, rows)]))
    notes = [f"- {_escaped(note)}" for note in analysis.notes]
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])])


def comma_separated(analysis: Analysis) -> str:
    """One line for each number of ranks; empty where something is not known."""
    names = ["ranks", "repeats", "failed", "oversubscribed"]
    for name in ("seconds", "speedup", "efficiency"):
        names += [name, f"{name}_low", f"{name}_high"]
    names += ["step_s", "startup_s", "first_step_s", "input_s", "compute_s", "communication_s", "wait_s"]
    names += ["slowest_rank", "slowest_share"]
    names += ["timeline_step_s", *(f"exposed_{name}_s" for name in ACTIVITIES)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in analysis.rows:
        words: list[object] = [row.ranks, row.repeats, row.failed, int(row.oversubscribed)]
        for estimate in (row.seconds, row.speedup, row.efficiency):
            words += [None] * 3 if estimate is None else [estimate.value, estimate.low, estimate.high]
        words += [row.step_s, row.startup_s, row.first_step_s]
        parts = row.parts
        words += [None] * 4 if parts is None else [parts.input, parts.compute, parts.communication, parts.wait]
        words += [None] * 2 if row.slowest is None else [row.slowest.rank, row.slowest.share]
        words += _exposed(row)
        writer.writerow(words)
    return text.getvalue()


def tables(analysis: Analysis) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, names of the columns and rows of each table."""
    seconds = "step ms" if analysis.mode == "weak" and analysis.measure == STEPS else "seconds"
    factor = 1000 if seconds == "step ms" else 1
    title = f"{analysis.mode.capitalize()} scaling, by {_measure(analysis)}; medians with 95 % intervals"
    names = ("ranks", "repeats", seconds, "speed-up", "efficiency")
    found: list[tuple[str, Sequence[str], list[list[str]]]] = [
        (title, names, [_row(row, factor) for row in analysis.rows])
    ]
    with_parts = [row for row in analysis.rows if row.parts is not None]
    if with_parts:
        inside = any(row.parts.communication is None for row in with_parts if row.parts is not None)
        what = "compute holds communication and wait for ranks that were slow inside a step" if inside else "mean ms"
        found.append((f"Where a step goes ({what})", _PARTS, [_part_row(row) for row in with_parts]))
    recorded = [row for row in analysis.rows if row.recorded is not None]
    if recorded:
        title = "What Horovod did meanwhile (ms of a step of rank 0; one more job at each N, with a timeline)"
        columns = ("ranks", "rank 0 is", "ms", *_ACTIVITIES)
        found.append((title, columns, [words for row in recorded for words in _recorded_rows(row)]))
    if analysis.fits:
        found.append(("Fitted laws", ("fit", "parameters", "residuals"), [_fit_row(fit) for fit in analysis.fits]))
    return found


def _measure(analysis: Analysis) -> str:
    if not analysis.measure:
        return "nothing, since no job counts"
    if analysis.measure != STEPS:
        return "the closing line"
    return "the time of a step" if analysis.mode == "weak" else "the time of all steps"


def _row(row: Row, factor: float) -> list[str]:
    repeats = f"{row.repeats} ({row.failed} failed)" if row.failed else str(row.repeats)
    seconds = "-" if row.seconds is None else interval(row.seconds.scaled(factor))
    words = ["-" if estimate is None else interval(estimate) for estimate in (row.speedup, row.efficiency)]
    return [f"{row.ranks}*" if row.oversubscribed else str(row.ranks), repeats, seconds, *words]


def _part_row(row: Row) -> list[str]:
    parts = row.parts
    if parts is None:
        return [str(row.ranks)]
    inside = [parts.input, parts.compute, parts.communication, parts.wait]
    return [
        str(row.ranks),
        *("-" if seconds is None else _ms(seconds, 4) for seconds in (row.step_s, *inside)),
        *("-" if seconds is None else f"{seconds:.3g}" for seconds in (row.startup_s, row.first_step_s)),
    ]


def _recorded_rows(row: Row) -> list[list[str]]:
    """A line for each part of the step, and one for the whole."""
    if row.recorded is None:
        return []
    found = list(row.recorded.windows)
    if len(found) > 1:
        together = {name: sum(one.activities[name] for one in found) for name in ACTIVITIES}
        found.append(Window(WHOLE, row.recorded.step_s, together))
    return [
        [str(row.ranks), one.name, _ms(one.seconds, 4), *(_ms(one.activities[name]) for name in ACTIVITIES)]
        for one in found
    ]


def _ms(seconds: float, digits: int = 3) -> str:
    """Milliseconds with so many digits, and without an exponent where there are more before the point."""
    if 0 <= seconds < 5e-8:
        return "0"
    return f"{1000 * seconds:.{digits}g}" if 1000 * abs(seconds) < 10**digits - 0.5 else f"{1000 * seconds:.0f}"


def _exposed(row: Row) -> list[object]:
    """Of the CSV: what the communication that is not hidden consists of."""
    if row.recorded is None:
        return [None] * (1 + len(ACTIVITIES))
    exposed = next((one.activities for one in row.recorded.windows if one.name == EXPOSED), {})
    return [row.recorded.timeline_step_s, *(exposed.get(name) for name in ACTIVITIES)]


def _fit_row(fit: Fit) -> list[str]:
    parameters = ", ".join(f"{name} {interval(estimate)}" for name, estimate in fit.parameters.items())
    residuals = ", ".join(f"{n}: {100 * residual:+.1f} %" for n, residual in fit.residuals.items())
    return [f"{fit.name}: {fit.formula}", parameters, residuals]


def interval(estimate: Estimate) -> str:
    """``1.92 [1.88, 1.95]``, or the value alone."""
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high == estimate.value:
        return _short(estimate.value)
    return f"{_short(estimate.value)} [{_short(estimate.low)}, {_short(estimate.high)}]"


def _short(value: float) -> str:
    return (
        f"{value:.3g}" if 0.001 <= abs(value) < 999.5 or value == 0 else f"{value:.2e}" if value < 1 else f"{value:.0f}"
    )


def readable(text: str) -> str:
    """Lines that a job printed, or that a file holds, without anything that a terminal would obey."""
    return "\n".join(map(printable, text.splitlines()))


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, words))} |"


def _escaped(text: str) -> str:
    """A text that Markdown shows as it is."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return printable(" ".join(text.split()))
