"""The command ``hvdkit trace``, and what it and ``hvdkit timeline merge`` print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np

from hvdkit.common.commands import AT_LEAST_0, PATH, group_of, print_any_name
from hvdkit.common.table import Page, Table
from hvdkit.common.units import count_text, printable, share_text, shortened
from hvdkit.read.causes import verdict
from hvdkit.read.trace.merging import merge as merge_files
from hvdkit.read.trace.results import RankTrace, TraceSummary, otherwise
from hvdkit.read.trace.summary import summarize

SUBCOMMANDS = {
    "summary": ("hvdkit.read.trace.cli:summary", "Operators, communication, data loading, rank by rank."),
}


@click.group(cls=group_of(SUBCOMMANDS, moved={"diff": "hvdkit diff A B"}))
def trace() -> None:
    """Read traces of PyTorch's profiler: what is a step spent on, and what does communication cost?

    Reads what torch.profiler exports with export_chrome_trace, with or without GPUs, also compressed with gzip.

    \b
      hvdkit launch -n 2 --torch-profile profile -- python train.py
      hvdkit trace summary profile

    Each subcommand has its own --help with an example.
    """
    print_any_name()


@click.command()
@click.argument("traces", nargs=-1, required=True, type=PATH, metavar="TRACE...")
@click.option("--top", type=AT_LEAST_0, default=15, metavar="N", help="Operators to list.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object, with all operators; times in seconds.")
def summary(traces: tuple[Path, ...], top: int, form: str | None) -> int:
    """Say what the steps of a training were spent on, from the traces of one rank or of all ranks of a run.

    A TRACE is a file, or a directory with one file for each rank. Computation is what GPU kernels do, or, without
    GPUs, the operators of the thread that trains; exposed is what no computation hides. A file that
    `hvdkit timeline merge` wrote has Horovod's exchanges in it, and they count.

    \b
    Examples:
      hvdkit trace summary profile
      hvdkit trace summary trace-0-of-2.json.gz trace-1-of-2.json.gz --json > summary.json

    Exit status: 0 success, 1 a file is no whole trace, 2 for bad usage, such as a file that is missing.
    """
    found = summarize(traces)
    summary_page(found, top).print(form, found)
    return 0


@click.command()
@click.argument("timeline", type=PATH)
@click.argument("trace", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, metavar="MERGED.json[.gz]", help="The file to write.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object; times in seconds.")
def merge(timeline: Path, trace: Path, output: Path, form: str | None) -> int:
    """Merge a timeline and a trace of torch.profiler on one time axis, and show how much communication is exposed.

    TRACE is what export_chrome_trace wrote on rank 0 in the same run. Exposed is the time in which a collective ran and
    nothing was computed: neither a GPU kernel nor, without GPUs, an operator of the training thread.

    \b
    Example:
      hvdkit timeline merge timeline.json trace.json -o merged.json

    Exit status: 0 success, 1 when a file cannot be used or the two cannot be aligned, 2 for bad usage.
    """
    overlap = merge_files(timeline, trace, output)
    times = overlap.found
    parts = {
        "communication": times.communication,
        "computation": times.computation,
        "both at once": times.overlapped,
        "exposed communication": times.exposed,
        "data loading": times.data,
        "other": times.other,
    }
    rows = [(name, f"{value:.3f}", share_text(value / times.window)) for name, value in parts.items()]
    said = f"{output}: {overlap.operations} operations in {times.window:.3f} ms of both files"
    table = Table("", ("what", "ms", "share"), rows, ("what",), f"computation: {overlap.computed_by}")
    Page([said, table]).print(form, overlap)
    return 0


_NAME_WIDTH = 40
_TIMES = {
    "computation": "computation",
    "communication": "communication",
    "waiting": "  waiting for other ranks",
    "overlapped": "  hidden by computation",
    "exposed": "  exposed",
    "data": "data loading",
    "exposed_data": "  exposed",
    "copies": "GPU copies",
    "other": "other",
}


def summary_page(summary: TraceSummary, top: int) -> Page:
    """What is said of a summary, with so many operators."""
    ranks = summary.ranks
    found: list[Table | str] = [*verdict(summary.causes, otherwise(summary)), "", *map(_headline, ranks)]
    found.append(_times(ranks))
    found.append(f"computation: {'; '.join(dict.fromkeys(rank.computed_by for rank in ranks))}")
    found += [f"note: {note}" for note in dict.fromkeys(note for rank in ranks for note in rank.notes)]
    found += [f"ranks are not compared: {summary.skew_note}"] if summary.skew_note else []
    return Page([*found, *([_operators(ranks, top)] if top else [])])


def _headline(rank: RankTrace) -> str:
    who = _label(rank) + (f" of {rank.size}" if rank.rank is not None and rank.size is not None else "")
    numbers = " to ".join(dict.fromkeys(str(step.number) for step in (*rank.steps[:1], *rank.steps[-1:])))
    steps = f"{count_text(len(rank.steps), 'step')} ({numbers})" if rank.steps else "no steps"
    extra = f"; {count_text(rank.skipped, 'event')} without a usable time" if rank.skipped else ""
    return f"{who}: {steps}, {count_text(rank.events, 'event')} in {printable(Path(rank.path).name)}{extra}"


def _label(rank: RankTrace) -> str:
    return printable(Path(rank.path).name) if rank.rank is None else f"rank {rank.rank}"


def _times(ranks: Sequence[RankTrace]) -> Table:
    """A row for each kind of time, a column for each rank, milliseconds and share."""
    stepped = all(rank.steps for rank in ranks)
    compared = all(rank.waiting is not None for rank in ranks)

    def each(rank: RankTrace, name: str) -> float:
        if name == "waiting":
            return rank.waiting or 0.0
        return float(getattr(rank.times, name)) / (len(rank.steps) if stepped else 1)

    rows = [["step" if stepped else "whole trace", *(f"{each(rank, 'window'):.3f}" for rank in ranks)]]
    for name, title in _TIMES.items():
        values = [(each(rank, name), each(rank, "window") or 1.0) for rank in ranks]
        if (name == "waiting" and not compared) or (name == "copies" and not any(value for value, _ in values)):
            continue
        heading = f"{title} or waiting" if name == "communication" and not compared else title
        rows.append([heading, *(f"{value:.3f} {share_text(value / whole):>5}" for value, whole in values)])
    heading = "ms per step" if stepped else "ms"
    return Table("", [heading, *map(_label, ranks)], rows, left=[heading])


def _operators(ranks: Sequence[RankTrace], top: int) -> Table:
    """Means over the ranks, 0 where one has no such call; the spread where there are several."""
    names = dict.fromkeys((operator.name, operator.kind) for rank in ranks for operator in rank.operators)
    place = {key: at for at, key in enumerate(names)}
    calls, own = sums = np.zeros((2, len(place), len(ranks)))
    for row, rank in enumerate(ranks):
        for operator in rank.operators:
            sums[:, place[operator.name, operator.kind], row] += operator.calls, operator.self_ms
    order = sorted(place, key=lambda key: (-own[place[key]].max(), key))
    cells: dict[str, Callable[[tuple[str, str]], object]] = {
        f"operator ({min(top, len(order))} of {len(order)})": lambda key: shortened(key[0], _NAME_WIDTH),
        "kind": lambda key: key[1],
        "calls": lambda key: f"{calls[place[key]].mean():.4g}",
        "self ms": lambda key: f"{own[place[key]].mean():.3f}",
    }
    if len(ranks) > 1:
        cells["self ms of ranks"] = lambda key: f"{own[place[key]].min():.3f} to {own[place[key]].max():.3f}"
    return Table.of(order[:top], cells)
