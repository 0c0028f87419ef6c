"""What was predicted, as a table for a terminal, as Markdown, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hvdkit.common import json_files
from hvdkit.common.intervals import CONFIDENCE, Estimate
from hvdkit.common.json_files import Document
from hvdkit.measure.bench.tables import interval
from hvdkit.measure.predict.link import Link
from hvdkit.measure.predict.model import HOST, NETWORK, CostModel
from hvdkit.measure.predict.prediction import Row

_NAMES = ("ranks", "hosts", "communication ms", "exposed ms", "straggler ms", "step ms", "efficiency")
_TIMES = ("communication", "exposed", "straggler", "step", "efficiency")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is shown.

    Attributes:
        model: the cost of an allreduce.
        rows: one for each number of ranks.
        assumed: what was given beside the measurements, by name.
        notes: full sentences: what a reader should know.
    """

    model: CostModel
    rows: tuple[Row, ...]
    assumed: dict[str, Any]
    notes: tuple[str, ...]


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
    times = frozenset(("communication", "exposed", "straggler", "step"))

    model: dict[str, Any]
    assumed: dict[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    confidence: float = CONFIDENCE


def predicted(prediction: Prediction) -> Predicted:
    """The prediction for a program."""
    units = {"_ms": 1e-3, "_us": 1e-6}
    assumed = {
        json_files.name_in_seconds(name) if name[-3:] in units else name: value * units[name[-3:]]
        if name[-3:] in units and value is not None
        else value
        for name, value in prediction.assumed.items()
    }
    return Predicted(prediction.model.as_json(), assumed, prediction.rows, prediction.notes)


def show(prediction: Prediction, console: Console) -> None:
    """Print it for a reader."""
    for level, link in ((HOST, prediction.model.host), (NETWORK, prediction.model.network)):
        if link is not None:
            console.print(f"{_WHERE[level]}: {_parameters(link)}", soft_wrap=True)
    table = Table(title="Prediction with 95 % intervals", title_justify="left", title_style="bold")
    for name in _NAMES:
        table.add_column(name, justify="right", overflow="fold")
    for row in prediction.rows:
        table.add_row(*_words(row))
    console.print(table)
    for note in prediction.notes:
        console.print(f"- {note}", soft_wrap=True)


def markdown(prediction: Prediction) -> str:
    """The same in Markdown."""
    lines = [_line(_NAMES), _line(["---:"] * len(_NAMES)), *(_line(_words(row)) for row in prediction.rows)]
    notes = [f"- {note.replace('*', chr(92) + '*')}" for note in prediction.notes]
    return "\n\n".join(["\n".join(lines), *(["\n".join(notes)] if notes else [])])


def comma_separated(prediction: Prediction) -> str:
    """One line for each number of ranks, in seconds; empty where something is not known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [name if name == "efficiency" else f"{name}_s" for name in _TIMES]
    ends = [f"{name}{end}" for name in columns for end in ("", "_low", "_high")]
    writer.writerow(["ranks", "hosts", "buckets", *ends, "extrapolated"])
    for row in prediction.rows:
        words: list[object] = [row.ranks, row.hosts, row.buckets]
        for one in _estimates(row):
            words += [None] * 3 if one is None else [one.value, one.low, one.high]
        writer.writerow([*words, int(row.extrapolated)])
    return text.getvalue()


_WHERE = {HOST: "Within a host", NETWORK: "Between hosts"}
_SHOWN = {
    "overhead_s": ("overhead", 1e6, "us"),
    "alpha_s": ("alpha", 1e6, "us"),
    "beta_s_per_byte": ("beta", 1e9, "ns/byte"),
    "gamma_s_per_byte": ("gamma", 1e9, "ns/byte"),
}


def _parameters(link: Link) -> str:
    told = link.parameters()
    words = [f"{name} {interval(told[key].scaled(factor))} {unit}"
             for key, (name, factor, unit) in _SHOWN.items() if key in told]  # fmt: skip
    return f"{link.algorithm}, {', '.join(words)}"


def _estimates(row: Row) -> tuple[Estimate | None, ...]:
    return (row.communication, row.exposed, row.straggler, row.step, row.efficiency)


def _words(row: Row) -> list[str]:
    *times, efficiency = _estimates(row)
    words = ["-" if one is None else interval(one.scaled(1000)) for one in times]
    if row.extrapolated:
        words[2] += "*"
    return [str(row.ranks), str(row.hosts), *words, "-" if efficiency is None else interval(efficiency)]


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"
