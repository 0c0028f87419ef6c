"""The terms as tables."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text
from hvdkit.measure.memory.terms import ZERO_STAGES, Need, PerRank

_RANKS = ["ranks", "data parallel", *(f"ZeRO {stage}" for stage in ZERO_STAGES)]


def page(need: Need, rows: Sequence[PerRank], notes: Sequence[str]) -> Page:
    """What a training needs on one rank, and on each of several."""
    least = need.activations is None
    terms = [[term.name, None if term.bytes is None else bytes_text(term.bytes), term.how] for term in need.terms()]
    terms.insert(4, ["sum of these", bytes_text(need.total), "without the activations: the least" if least else ""])
    if need.peak is not None:
        terms.insert(5, ["peak of a step", bytes_text(need.peak), "with what operations need for a moment"])
    ranks = [
        [row.ranks, bytes_text(row.data_parallel), *(bytes_text(row.zero[stage]) for stage in ZERO_STAGES)]
        for row in rows
    ]
    names = ("term", "memory", "how")
    one = Table("Memory of a training on one rank", names, terms, left=("term", "how"))
    title = "On each rank, without its activations" if least else "On each rank"
    return Page([one, Table(title, _RANKS, ranks)], notes)
