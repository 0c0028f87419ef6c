"""What was predicted, as a table, as CSV, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdkit.common import json_files, plot, table
from hvdkit.common.intervals import CONFIDENCE
from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table
from hvdkit.common.units import interval_text
from hvdkit.measure.predict.link import Link
from hvdkit.measure.predict.model import HOST, NETWORK, CostModel
from hvdkit.measure.predict.prediction import PredictionRow

_NAMES = ("ranks", "hosts", "communication ms", "exposed ms", "straggler ms", "step ms", "efficiency")
_TIMES = ("communication", "exposed", "straggler", "step")


class Predicted(Document, frozen=True):
    """A prediction; seconds and bytes.

    Attributes:
        model: what an allreduce costs: its algorithm, ``ppn``, and by level ("host", "network") the parameters, the
            pieces of the line through sizes, and what is left over; None for a level that is not known.
        assumed: what was given beside the measurements, by the names of the options, times in seconds.
        rows: one for each number of ranks.
        notes: what a reader should know, full sentences.
        confidence: of the intervals.
    """

    kind = "predict"
    written_by = "hvdkit predict --json"
    times = frozenset(_TIMES)

    model: dict[str, Any]
    assumed: dict[str, Any]
    rows: tuple[PredictionRow, ...]
    notes: tuple[str, ...]
    confidence: float = CONFIDENCE


def predicted(
    model: CostModel, rows: Sequence[PredictionRow], given: dict[str, Any], notes: Sequence[str]
) -> Predicted:
    """A prediction for a program; ``given`` is what was given beside the measurements, by name."""
    for unit, seconds in (("_ms", 1e-3), ("_us", 1e-6)):
        given = json_files.in_seconds(given, frozenset(name for name in given if name.endswith(unit)), seconds)
    return Predicted(model.as_json(), given, tuple(rows), tuple(notes))


def page(model: CostModel, rows: Sequence[PredictionRow], notes: Sequence[str]) -> Page:
    """The parameters of the model and a line for each number of ranks; so has CSV."""
    found: list[Table | str] = [
        f"{_WHERE[level]}: {_parameters(link)}"
        for level, link in ((HOST, model.host), (NETWORK, model.network))
        if link is not None
    ]
    known = [row.communication for row in rows if row.communication is not None and row.ranks > 1]
    what = "95% intervals" if all(one.low is not None for one in known) else "intervals from published errors alone"
    found.append(Table(f"Prediction with {what}", _NAMES, [_words(row) for row in rows]))
    return Page(found, notes, [_csv_row(row) for row in rows])


def _csv_row(row: PredictionRow) -> dict[str, object]:
    """In seconds; None where something is not known."""
    found: dict[str, object] = {"ranks": row.ranks, "hosts": row.hosts, "buckets": row.buckets}
    for name in _TIMES:
        found |= table.ends(f"{name}_s", getattr(row, name))
    return found | table.ends("efficiency", row.efficiency) | {"extrapolated": int(row.extrapolated)}


_WHERE = {HOST: "Within a host", NETWORK: "Between hosts"}
_SHOWN = {
    "overhead_s": ("overhead", 1e6, "us"),
    "alpha_s": ("alpha", 1e6, "us"),
    "beta_s_per_byte": ("beta", 1e9, "ns/byte"),
    "gamma_s_per_byte": ("gamma", 1e9, "ns/byte"),
}


def _parameters(link: Link) -> str:
    told = link.parameters()
    words = [f"{name} {interval_text(told[key].scaled(factor))} {unit}"
             for key, (name, factor, unit) in _SHOWN.items() if key in told]  # fmt: skip
    return f"{link.algorithm}, {', '.join(words)}"


def _words(row: PredictionRow) -> list[object]:
    times = [getattr(row, name) for name in _TIMES]
    words = [None if one is None else interval_text(one.scaled(1000)) for one in times]
    if row.extrapolated:
        words[2] = f"{words[2] or '-'}*"
    return [row.ranks, row.hosts, *words, None if row.efficiency is None else interval_text(row.efficiency)]


def draw(path: Path, rows: Sequence[PredictionRow]) -> None:
    """Write the figure, as ``hvdkit.common.plot.write`` does; ``rows`` with an efficiency are in it."""
    plot.write(path, lambda axes: _efficiency(axes, rows), size=(6, 4))


def _efficiency(axes: Any, rows: Sequence[PredictionRow]) -> None:
    known = [(row.ranks, row.efficiency) for row in rows if row.efficiency is not None]
    ranks = [n for n, _ in known]
    axes.fill_between(
        ranks,
        [one.value if one.low is None else one.low for _, one in known],
        [one.value if one.high is None else one.high for _, one in known],
        alpha=0.25,
        label="interval",
    )
    axes.plot(ranks, [one.value for _, one in known], marker="o", label="predicted")
    axes.set(xscale="log", xlabel="ranks", ylabel="efficiency", ylim=(0, 1.05))
    axes.legend()
