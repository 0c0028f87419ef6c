"""Two recordings compared, for people: the verdict first."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.common.table import Page, Table
from hvdkit.common.units import duration_text, number_text, shortened
from hvdkit.read.timeline.difference import PhaseChange, TimelineDifference

_NAME = 40


def page(
    found: TimelineDifference, above: Sequence[PhaseChange], limit: float | None, top: int, *, show_all: bool
) -> Page:
    """What takes more time in B, or less.

    Args:
        found: the comparison.
        above: changes above the limit of --fail-above.
        limit: that limit, None where none was given.
        top: lines of the table.
        show_all: also changes that may be chance.
    """
    told = [change for change in found.changes if change.significant or (change.p_value is None and change.explains)]
    shown = (found.changes if show_all else told)[:top]
    parts: list[Table | str] = [f"Verdict: {_verdict(found)}", ""]
    for name, whole in (("A", found.a), ("B", found.b)):
        parts.append(
            f"{name}: {whole.operations} operations in {duration_text(whole.duration)}, communication "
            f"{duration_text(whole.communication)}, {whole.path}"
        )
    if shown:
        parts.append(_table(shown))
    parts += _rest(found)
    parts += [f"slower than {limit:g}x: {_named(change)} ({_ratio(change)})" for change in above]
    return Page(parts)


def _verdict(found: TimelineDifference) -> str:
    """What recurs and is no chance; first operations and rare long ones are told further below."""
    if not found.changes:
        return "No tensor is in both recordings: they are not of the same training."
    sure = next((change for change in found.changes if change.significant), None)
    if sure is None:
        return f"Nothing differs by more than chance in {len(found.changes)} comparisons of phases."
    return (
        f"The {_named(sure)} takes {'longer' if sure.explains > 0 else 'less time'} in B: "
        f"{_signed(sure.explains)} in all, the median {_time(sure.median_b)} instead of {_time(sure.median_a)}."
    )


def _table(changes: Sequence[PhaseChange]) -> Table:
    rows = [
        (
            change.phase,
            shortened(change.tensor, _NAME),
            _signed(change.explains),
            _time(change.median_a),
            _time(change.median_b),
            _time(change.p95_a),
            _time(change.p95_b),
            _ratio(change),
            None if change.p_value is None else number_text(change.p_value, 2),
        )
        for change in changes
    ]
    names = ("phase", "tensor", "explains", "median A", "median B", "95% A", "95% B", "B/A", "p")
    return Table("", names, rows, ("phase", "tensor"))


def _rest(found: TimelineDifference) -> list[str]:
    chance = [change for change in found.changes if change.p_value is not None and not change.significant]
    lines = [f"{len(found.changes)} comparisons, {len(chance)} of them without a significant change"]
    if chance and chance[0].explains:
        lines.append(
            f"the largest of these: {_signed(chance[0].explains)}, {_named(chance[0])}; such time is that of rare long "
            "operations, or chance"
        )
    once = max(found.changes, key=lambda change: abs(change.once), default=None)
    if once is not None and once.once:
        lines.append(f"once, in first operations: at most {_signed(once.once)}, {_named(once)}")
    for name, rows in (("A", found.only_a), ("B", found.only_b)):
        lines += [f"only in {name}: {row.kind} of {row.tensor} ({row.operations} operations)" for row in rows]
    return lines


def _named(change: PhaseChange) -> str:
    return f"{change.phase} of {change.tensor}"


def _signed(time: float) -> str:
    return ("-" if time < 0 else "+") + duration_text(abs(time))


def _time(median: float | None) -> str | None:
    return None if median is None else duration_text(median)


def _ratio(change: PhaseChange) -> str | None:
    return None if change.ratio is None else f"{change.ratio:.3g}x"
