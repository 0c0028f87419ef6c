"""What was found, as tables and as the lines of CSV files; and a plan as a table."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.common import table
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, count_text, interval_text, ranks_text, share_text, shortened
from hvdkit.measure.emulate.analysis import RULE, EmulateSummary, Outlier, RankRow, SizeRow
from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.emulate.spread import Times

OUTLIERS = 10
"""How many are listed for a reader; JSON has all."""
DIGITS = 4
_NAME = 40


def page(analysis: EmulateSummary) -> Page:
    """The tables and the notes; CSV has a line for each size, then one for all, in seconds and bytes per second."""
    return Page(tables(analysis), analysis.notes, [_csv_row(row) for row in (*analysis.rows, analysis.overall)])


def plan_page(plan: ReplayPlan) -> Page:
    """A plan for a reader: its collectives in the order of their replay."""
    gaps = any(one.gap_s for one in plan.collectives)
    found = plan_table(plan.collectives, "Collectives of a step, in the order of their replay", gaps=gaps)
    sizes = [one.nbytes for one in plan.collectives][::-1]
    said = [
        f"From {plan.source}.",
        f"{count_text(len(sizes), 'collective')}, {sum(sizes)} bytes per step; {trials_text(plan)}.",
    ]
    if len(sizes) <= OUTLIERS:
        said.append(f"Bytes, in the reverse order (first layer first): {sizes}")
    return Page([found, *said])


def plan_table(collectives: Sequence[Collective], title: str, *, longest: int = _NAME, gaps: bool = True) -> Table:
    """Collectives in the order of their replay, with so many characters of a name, and the gaps before them."""
    names = ("order", "name", "dtype", "elements", "bytes", *(("gap ms",) if gaps else ()))
    rows = [
        [number, shortened(one.name, longest), one.dtype, one.elements, one.nbytes]
        + ([f"{1000 * one.gap_s:.4g}"] if gaps else [])
        for number, one in enumerate(collectives, start=1)
    ]
    return Table(title, names, rows, left=("name", "dtype"))


def trials_text(plan: ReplayPlan) -> str:
    """How many steps, and why."""
    if plan.batch_count is None:
        return f"{plan.trials} {'trial (step)' if plan.trials == 1 else 'trials (steps)'}"
    return (
        f"batch_count {plan.batch_count} ({plan.samples} samples / {plan.batch_size} per step, rounded up), trials "
        f"{plan.trials} (batch_count * {count_text(plan.epochs or 1, 'epoch')})"
    )


def samples_csv(results: EmulateResults) -> str:
    """One line for each collective that was measured, in their order; times in seconds, each rank's own last."""
    rows = []
    for one in results.samples:
        collective = results.plan.collectives[one.index]
        found = {"trial": one.trial, "index": one.index, "name": collective.name, "type": collective.dtype}
        found |= {"size": one.nbytes, "slowest_s": one.slowest_s, "slowest_rank": one.slowest_rank}
        found |= {"skew_s": one.skew_s, "transfer_s": one.transfer_s}
        rows.append(found | {f"rank{rank}_s": own for rank, own in enumerate(one.ranks_s)})
    return table.comma_separated(rows)


def _csv_row(row: SizeRow) -> dict[str, object]:
    found: dict[str, object] = {"size": row.nbytes, "count": row.count, "type": row.dtype, "per_step": row.per_step}
    found["samples"] = row.slowest.count
    for name in ("slowest", "skew", "transfer"):
        one = getattr(row, name)
        found |= {f"{name}_mean": one.mean, f"{name}_min": one.min, **table.ends(f"{name}_p50", one.p50)}
        found |= {f"{name}_p90": one.p90, f"{name}_p99": one.p99, f"{name}_p99.9": one.p999, f"{name}_max": one.max}
    return found | table.ends("algbw", row.algbw) | table.ends("busbw", row.busbw)


def tables(analysis: EmulateSummary) -> list[Table]:
    """The tables of an analysis."""
    asked = analysis.asked
    by = f" by {asked.algorithm}" if asked.algorithm != "library" else ""
    rows = (*analysis.rows, analysis.overall)
    found = [
        Table(
            f"{asked.collective}{by}, engine {asked.engine}, {ranks_text(asked.ranks)}, {analysis.trials} "
            "trials: delay of the slowest rank in ms, with the median's 95% interval",
            ("size", "samples", "p50", "p90", "p99", "p99.9", "max"),
            [[_size(row), row.slowest.count, *_percentiles(row.slowest)] for row in rows],
        ),
        Table(
            "Its parts (medians in ms) and the bandwidth of the transfer, GB/s",
            ("size", "skew", "transfer", "algbw", "busbw"),
            [_parts(row) for row in rows],
        ),
    ]
    if analysis.step is not None:
        found.append(
            Table(
                f"A whole step, ms: {analysis.step_is}",
                ("steps", "p50", "p90", "p99", "p99.9", "max"),
                [[analysis.step.count, *_percentiles(analysis.step)]],
            )
        )
    if len(analysis.ranks) > 1:
        found.append(
            Table(
                "Each rank's own time, ms; slowest: longest own time, latest: shortest own time (it came last)",
                ("rank", "p50", "max", "slowest", "latest"),
                [_rank(one) for one in analysis.ranks],
            )
        )
    if analysis.outliers:
        found.append(_outliers(analysis.outliers))
    return found


def _size(row: SizeRow) -> object:
    return "all" if row.nbytes is None else row.nbytes


def _parts(row: SizeRow) -> list[object]:
    medians = [_ms(times.p50.value) for times in (row.skew, row.transfer)]
    algbw = None if row.algbw is None else f"{row.algbw.value / 1e9:.4g}"
    busbw = None if row.busbw is None else interval_text(row.busbw.scaled(1e-9), DIGITS)
    return [_size(row), *medians, algbw, busbw]


def _percentiles(times: Times) -> list[object]:
    return [
        interval_text(times.p50.scaled(1000), DIGITS),
        *(None if value is None else _ms(value) for value in (times.p90, times.p99, times.p999)),
        _ms(times.max),
    ]


def _rank(one: RankRow) -> list[object]:
    own = interval_text(one.own.p50.scaled(1000), DIGITS)
    return [one.rank, own, _ms(one.own.max), share_text(one.slowest), share_text(one.latest)]


def _outliers(outliers: Sequence[Outlier]) -> Table:
    """The table of the first ``OUTLIERS`` outliers; the note counts the others."""
    rest = len(outliers) - OUTLIERS
    more = f" The other {rest} are in the JSON." if rest > 0 else ""
    return Table(
        f"Outliers: {len(outliers)}; times in ms, slowest and late are ranks",
        ("trial", "collective", "bytes", "ms", "/ median", "skew", "transfer", "slowest", "late"),
        [
            [
                one.trial,
                shortened(one.name, _NAME),
                bytes_text(one.nbytes),
                _ms(one.slowest_s),
                None if one.times_median is None else f"{one.times_median:.3g} x",
                _ms(one.skew_s),
                _ms(one.transfer_s),
                one.slowest_rank,
                one.latest_rank,
            ]
            for one in outliers[:OUTLIERS]
        ],
        left=("collective",),
        note=f"Outlier: {RULE}.{more}",
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}"
