"""What was found, as tables for a terminal, as Markdown and as CSV; and a plan as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdkit.common.intervals import Estimate
from hvdkit.common.units import bytes_text, printable, shortened
from hvdkit.measure.bench.analysis import ranks_text
from hvdkit.measure.emulate.analysis import RULE, Analysis, Outlier, RankRow, Row
from hvdkit.measure.emulate.plan import Plan
from hvdkit.measure.emulate.results import Results
from hvdkit.measure.emulate.spread import Times

OUTLIERS = 10
"""How many are listed for a reader; JSON has all."""
WIDTH = 160
"""Columns of what is not printed to a terminal."""
_NAME = 40


@dataclass(frozen=True, slots=True)
class Grid:
    """One table.

    Attributes:
        title: what it is.
        names: of the columns; those that start with < are aligned to the left.
        rows: words.
        note: a sentence below; "" without one.
    """

    title: str
    names: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""

    @property
    def headings(self) -> list[tuple[str, bool]]:
        """Name of each column, and whether it is aligned to the left."""
        return [(name.removeprefix("<"), name.startswith("<")) for name in self.names]


def text(analysis: Analysis, console: Console) -> None:
    """Print it for a reader."""
    for grid in grids(analysis):
        _print(grid, console)
    for note in analysis.notes:
        console.print(f"- {printable(note)}", soft_wrap=True, markup=False, highlight=False)


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan for a reader: its collectives in the order of their replay."""
    gaps = any(one.gap_s for one in plan.collectives)
    names = ("order", "<name", "<dtype", "elements", "bytes", *(("gap ms",) if gaps else ()))
    rows = [
        [
            str(number),
            printable(shortened(one.name, _NAME)),
            one.dtype,
            str(one.elements),
            str(one.nbytes),
            *([f"{1000 * one.gap_s:.4g}"] if gaps else []),
        ]
        for number, one in enumerate(plan.collectives, start=1)
    ]
    _print(Grid("Collectives of a step, in the order of their replay", names, rows), console)
    console.print(f"From {printable(plan.source)}.", soft_wrap=True, markup=False, highlight=False)
    sizes = [one.nbytes for one in plan.collectives][::-1]
    many = f"{len(sizes)} {'collective' if len(sizes) == 1 else 'collectives'}"
    console.print(f"{many}, {sum(sizes)} bytes per step; {trials_text(plan)}.", soft_wrap=True)
    if len(sizes) <= OUTLIERS:
        console.print(f"Bytes, in the reverse order (first layer first): {sizes}", soft_wrap=True)


def trials_text(plan: Plan) -> str:
    """How many steps, and why."""
    if plan.batch_count is None:
        return f"{plan.trials} {'trial (step)' if plan.trials == 1 else 'trials (steps)'}"
    return (
        f"batch_count {plan.batch_count} ({plan.samples} samples / {plan.batch_size} per step, rounded up), trials "
        f"{plan.trials} (batch_count * {plan.epochs} {'epoch' if plan.epochs == 1 else 'epochs'})"
    )


def markdown(analysis: Analysis) -> str:
    """The same tables in Markdown."""
    blocks = []
    for grid in grids(analysis):
        lines = [f"**{_escaped(grid.title)}**", "", _line(name for name, _ in grid.headings)]
        lines.append(_line("---" if left else "---:" for _, left in grid.headings).replace("\\", ""))
        lines.extend(map(_line, grid.rows))
        if grid.note:
            lines += ["", _escaped(grid.note)]
        blocks.append("\n".join(lines))
    notes = [f"- {_escaped(note)}" for note in analysis.notes]
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])])


def comma_separated(analysis: Analysis) -> str:
    """One line for each size, then one for all with an empty size; times in seconds, bandwidths in bytes per second."""
    parts = ("samples", "mean", "min", "p50", "p50_low", "p50_high", "p90", "p99", "p99.9", "max")
    names = ["size", "count", "type", "per_step", "samples"]
    for what in ("slowest", "skew", "transfer"):
        names += [f"{what}_{part}" for part in parts[1:]]
    names += ["algbw", "algbw_low", "algbw_high", "busbw", "busbw_low", "busbw_high"]
    return _csv(names, (_csv_row(row) for row in (*analysis.rows, analysis.overall)))


def samples_csv(results: Results) -> str:
    """One line for each collective that was measured, in their order; times in seconds, each rank's own last."""
    names = ["trial", "index", "name", "type", "size", "slowest_s", "slowest_rank", "skew_s", "transfer_s"]
    ranks = max((len(one.ranks_s) for one in results.samples), default=0)
    names += [f"rank{rank}_s" for rank in range(ranks)]
    collectives = results.plan.collectives
    rows: Iterable[Sequence[Any]] = (
        [
            one.trial,
            one.index,
            collectives[one.index].name,
            collectives[one.index].dtype,
            one.nbytes,
            one.slowest_s,
            one.slowest_rank,
            one.skew_s,
            one.transfer_s,
            *one.ranks_s,
        ]
        for one in results.samples
    )
    return _csv(names, rows)


def _csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return file.getvalue()


def _csv_row(row: Row) -> list[Any]:
    words: list[Any] = [row.nbytes, row.count, row.dtype, row.per_step, row.slowest.count]
    for one in (row.slowest, row.skew, row.transfer):
        words += [one.mean, one.min, one.p50.value, one.p50.low, one.p50.high, one.p90, one.p99, one.p999, one.max]
    for rate in (row.algbw, row.busbw):
        words += [None] * 3 if rate is None else [rate.value, rate.low, rate.high]
    return words


def grids(analysis: Analysis) -> list[Grid]:
    """The tables of an analysis."""
    asked = analysis.asked
    by = f" by {asked.algorithm}" if asked.algorithm != "library" else ""
    rows = (*analysis.rows, analysis.overall)
    found = [
        Grid(
            f"{asked.collective}{by}, engine {asked.engine}, {ranks_text(asked.ranks)}, {analysis.trials} "
            "trials: delay of the slowest rank in ms, with the median's 95 % interval",
            ("size", "samples", "p50", "p90", "p99", "p99.9", "max"),
            [[_size(row), str(row.slowest.count), *_percentiles(row.slowest)] for row in rows],
        ),
        Grid(
            "Its parts (medians in ms) and the bandwidth of the transfer, GB/s",
            ("size", "skew", "transfer", "algbw", "busbw"),
            [_parts(row) for row in rows],
        ),
    ]
    if analysis.step is not None:
        found.append(
            Grid(
                f"A whole step, ms: {analysis.step_is}",
                ("steps", "p50", "p90", "p99", "p99.9", "max"),
                [[str(analysis.step.count), *_percentiles(analysis.step)]],
            )
        )
    if len(analysis.ranks) > 1:
        found.append(
            Grid(
                "Each rank's own time, ms; slowest: longest own time, latest: shortest own time (it came last)",
                ("rank", "p50", "max", "slowest", "latest"),
                [_rank(one) for one in analysis.ranks],
            )
        )
    if analysis.outliers:
        found.append(_outliers(analysis.outliers))
    return found


def _size(row: Row) -> str:
    return "all" if row.nbytes is None else str(row.nbytes)


def _parts(row: Row) -> list[str]:
    medians = [_ms(times.p50.value) for times in (row.skew, row.transfer)]
    algbw = "-" if row.algbw is None else f"{row.algbw.value / 1e9:.4g}"
    busbw = "-" if row.busbw is None else with_interval(row.busbw.scaled(1e-9))
    return [_size(row), *medians, algbw, busbw]


def _percentiles(times: Times) -> list[str]:
    return [
        with_interval(times.p50.scaled(1000)),
        *("-" if value is None else _ms(value) for value in (times.p90, times.p99, times.p999)),
        _ms(times.max),
    ]


def _rank(one: RankRow) -> list[str]:
    return [
        str(one.rank),
        with_interval(one.own.p50.scaled(1000)),
        _ms(one.own.max),
        f"{100 * one.slowest:.0f} %",
        f"{100 * one.latest:.0f} %",
    ]


def _outliers(outliers: Sequence[Outlier]) -> Grid:
    rest = len(outliers) - OUTLIERS
    more = f" The other {rest} are in the JSON." if rest > 0 else ""
    return Grid(
        f"Outliers: {len(outliers)}; times in ms, slowest and late are ranks",
        ("trial", "<collective", "bytes", "ms", "/ median", "skew", "transfer", "slowest", "late"),
        [
            [
                str(one.trial),
                printable(shortened(one.name, _NAME)),
                bytes_text(one.nbytes),
                _ms(one.slowest_s),
                "-" if one.times_median is None else f"{one.times_median:.3g} x",
                _ms(one.skew_s),
                _ms(one.transfer_s),
                str(one.slowest_rank),
                "-" if one.latest_rank is None else str(one.latest_rank),
            ]
            for one in outliers[:OUTLIERS]
        ],
        f"Outlier: {RULE}.{more}",
    )


def with_interval(estimate: Estimate) -> str:
    """``1.92 [1.88, 1.95]``, or the value alone."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.4g}"
    return f"{estimate.value:.4g} [{estimate.low:.3g}, {estimate.high:.3g}]"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}"


def _print(grid: Grid, console: Console) -> None:
    table = Table(title=Text(grid.title, "bold"), title_justify="left")
    for name, left in grid.headings:
        table.add_column(Text(name), justify="left" if left else "right", overflow="fold")
    for row in grid.rows:
        table.add_row(*map(Text, row))
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(table)
    if grid.note:
        console.print(grid.note, soft_wrap=True, markup=False, highlight=False)


def _line(words: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, words))} |"


def _escaped(words: str) -> str:
    """A text that Markdown shows as it is."""
    for sign in "\\`*_[]<>|":
        words = words.replace(sign, f"\\{sign}")
    return " ".join(words.split())
