"""The terms as tables for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hvdkit.common.units import bytes_text
from hvdkit.measure.memory.terms import ZERO_STAGES, Need, PerRank

_RANKS = ["ranks", "data parallel", *(f"ZeRO {stage}" for stage in ZERO_STAGES)]


def show(need: Need, rows: Sequence[PerRank], notes: Sequence[str], console: Console) -> None:
    """Print it for a reader."""
    for title, names, lines in _tables(need, rows):
        table = Table(title=title, title_justify="left", title_style="bold")
        for name in names:
            table.add_column(name, justify="left" if name in ("term", "how") else "right", overflow="fold")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for note in notes:
        console.print(f"- {note}", soft_wrap=True)


def markdown(need: Need, rows: Sequence[PerRank], notes: Sequence[str]) -> str:
    """The same in Markdown."""
    blocks = []
    for title, names, lines in _tables(need, rows):
        rule = ["---" if name in ("term", "how") else "---:" for name in names]
        blocks.append("\n".join([f"**{title}**", "", *(f"| {' | '.join(line)} |" for line in [names, rule, *lines])]))
    return "\n\n".join([*blocks, *(["\n".join(f"- {note}" for note in notes)] if notes else [])])


def _tables(need: Need, rows: Sequence[PerRank]) -> list[tuple[str, list[str], list[list[str]]]]:
    terms = [[term.name, bytes_text(term.bytes), term.how] for term in need.terms()]
    terms.insert(4, ["sum of these", bytes_text(need.total), ""])
    if need.peak is not None:
        terms.insert(5, ["peak of a step", bytes_text(need.peak), "with what operations need for a moment"])
    ranks = [
        [str(row.ranks), bytes_text(row.data_parallel), *(bytes_text(row.zero[stage]) for stage in ZERO_STAGES)]
        for row in rows
    ]
    return [
        ("Memory of a training on one rank", ["term", "memory", "how"], terms),
        ("On each rank", _RANKS, ranks),
    ]
