"""The commands ``hvdkit trace summary`` and ``hvdkit timeline merge``, and what they print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import click

from hvdkit.common.causes import verdict
from hvdkit.common.commands import AT_LEAST_0, PATH
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, count_text, printable, share_text, shortened
from hvdkit.read.trace.causes import otherwise
from hvdkit.read.trace.merging import merge as merge_files
from hvdkit.read.trace.results import Operator, RankTrace, TraceSkew, TraceSummary
from hvdkit.read.trace.summary import summarize


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
@click.option("--offset-us", type=float, default=0, metavar="US", help="Microseconds to add to the times of TRACE.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object; times in seconds.")
def merge(timeline: Path, trace: Path, output: Path, offset_us: float, form: str | None) -> int:
    """Merge a timeline and a trace of torch.profiler on one time axis, and show how much communication is exposed.

    TRACE is what export_chrome_trace wrote on rank 0 in the same run. Exposed is the time in which a collective ran and
    nothing was computed: neither a GPU kernel nor, without GPUs, an operator of the training thread.

    \b
    Example:
      hvdkit timeline merge timeline.json trace.json -o merged.json

    Exit status: 0 success, 1 when a file cannot be used or the two cannot be aligned, 2 for bad usage.
    """
    overlap = merge_files(timeline, trace, output, offset_us=offset_us)
    rows = [
        (name, f"{value:.3f}", share_text(value / overlap.window))
        for name, value in (
            ("communication", overlap.communication),
            ("computation", overlap.computation),
            ("both at once", overlap.overlapped),
            ("exposed communication", overlap.exposed),
            ("neither", overlap.neither),
        )
    ]
    said = f"{output}: {overlap.operations} operations in {overlap.window:.3f} ms of both files"
    table = Table("", ("what", "ms", "share"), rows, ("what",), f"computation: {overlap.computed_by}")
    Page([said, table]).print(form, overlap)
    return 0


_NAME_WIDTH = 40
_ROWS = (
    ("computation", "computation"),
    ("communication", "communication"),
    ("waiting", "  waiting for other ranks"),
    ("overlapped", "  hidden by computation"),
    ("exposed", "  exposed"),
    ("data", "data loading"),
    ("exposed_data", "  exposed"),
    ("copies", "GPU copies"),
    ("other", "other"),
)


def summary_page(summary: TraceSummary, top: int) -> Page:
    """What is said of a summary.

    Args:
        summary: of one trace or several.
        top: how many operators.
    """
    ranks = summary.ranks
    found: list[Table | str] = [*verdict(summary.causes, otherwise(summary)), "", *map(_headline, ranks)]
    found.append(_times(ranks, summary.skew))
    found.append(f"computation: {'; '.join(dict.fromkeys(rank.computed_by for rank in ranks))}")
    found += [f"note: {note}" for note in dict.fromkeys(note for rank in ranks for note in rank.notes)]
    if any(rank.memory for rank in ranks):
        found.append(_memory(ranks))
    found.append(f"skew between ranks: {_skew(summary.skew, summary.skew_note)}")
    return Page([*found, *([_operators(ranks, top)] if top else [])])


def _headline(rank: RankTrace) -> str:
    who = label(rank) + (f" of {rank.size}" if rank.rank is not None and rank.size is not None else "")
    numbers = " to ".join(dict.fromkeys(str(step.number) for step in (*rank.steps[:1], *rank.steps[-1:])))
    steps = f"{count_text(len(rank.steps), 'step')} ({numbers})" if rank.steps else "no steps"
    odd = [f"{count_text(rank.skipped, 'event')} without a usable time"] if rank.skipped else []
    odd += [f"{count_text(rank.repeated, 'repeated event')}, counted once"] if rank.repeated else []
    extra = f"; {', '.join(odd)}" if odd else ""
    return f"{who}: {steps}, {count_text(rank.events, 'event')} in {printable(Path(rank.path).name)}{extra}"


def label(rank: RankTrace) -> str:
    """ "rank 3", or the name of the file."""
    return printable(Path(rank.path).name) if rank.rank is None else f"rank {rank.rank}"


def _times(ranks: Sequence[RankTrace], skew: TraceSkew | None) -> Table:
    """The table of times: a row for each kind, a column for each rank, milliseconds and share."""
    stepped = all(rank.steps for rank in ranks)
    counts = [len(rank.steps) if stepped else 1 for rank in ranks]
    windows = [f"{rank.times.window / count:.3f}" for rank, count in zip(ranks, counts, strict=True)]
    rows = [["step" if stepped else "whole trace", *windows]]
    waits = {} if skew is None else {one.rank: one.waiting for one in skew.ranks}
    for name, title in _ROWS:
        if name == "waiting":
            if not waits:
                continue
            values = [waits[rank.rank or 0] * count for rank, count in zip(ranks, counts, strict=True)]
        else:
            values = [float(getattr(rank.times, name)) for rank in ranks]
        if name == "copies" and not any(values):
            continue
        cells = [
            f"{value / count:.3f} {share_text(value / (rank.times.window or 1)):>5}"
            for rank, value, count in zip(ranks, values, counts, strict=True)
        ]
        rows.append([f"{title} or waiting" if name == "communication" and not waits else title, *cells])
    return _table(["ms per step" if stepped else "ms", *map(label, ranks)], rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    return Table("", names, rows, left=names[:1])


def _who(rank: RankTrace) -> object:
    return "?" if rank.rank is None else rank.rank


def _memory(ranks: Sequence[RankTrace]) -> Table:
    rows = [
        [one.device, _who(rank), bytes_text(one.peak), _signed_bytes(one.growth), bytes_text(one.allocated)]
        for rank in ranks
        for one in rank.memory
    ]
    return _table(("memory", "rank", "peak", "growth", "allocated in all"), rows)


def _signed_bytes(size: float) -> str:
    return ("-" if size < 0 else "") + bytes_text(abs(size))


def _skew(skew: TraceSkew | None, note: str) -> str:
    if skew is None:
        return f"not known ({note})"
    ranks = ", ".join(
        f"rank {rank.rank}: last in {rank.last}, {rank.late:.3f} ms late on average, {rank.computation:.3f} ms "
        "of computation a step"
        for rank in skew.ranks
    )
    return (
        f"in {skew.collectives} collectives the last rank came {skew.median:.3f} ms after the first (median; largest "
        f"{skew.largest:.3f} ms); {ranks}"
    )


def _operators(ranks: Sequence[RankTrace], top: int) -> Table:
    """Means over the ranks; the spread where there are several."""
    by_name: dict[tuple[str, str], list[Operator | None]] = {}
    for index, rank in enumerate(ranks):
        for one in rank.operators:
            by_name.setdefault((one.name, one.kind), [None] * len(ranks))[index] = one
    gpu = any(one.gpu_total_ms for rank in ranks for one in rank.operators)
    memory = any(rank.memory for rank in ranks)
    titles = ["calls", "self ms", *(["self ms of ranks"] if len(ranks) > 1 else []), "total ms"]
    titles += (["GPU self ms", "GPU total ms"] if gpu else []) + (["memory"] if memory else [])
    shown = sorted(by_name.items(), key=lambda item: (-max(_values(item[1], "gpu_self_ms", "self_ms")), item[0]))
    rows = []
    for (name, kind), calls in shown[:top]:
        own = _values(calls, "self_ms")
        cells = [f"{fmean(_values(calls, 'calls')):.4g}", f"{fmean(own):.3f}"]
        if len(ranks) > 1:
            cells.append(f"{min(own):.3f} to {max(own):.3f}")
        cells.append(f"{fmean(_values(calls, 'total_ms')):.3f}")
        if gpu:
            cells += [f"{fmean(_values(calls, field)):.3f}" for field in ("gpu_self_ms", "gpu_total_ms")]
        if memory:
            cells.append(_signed_bytes(fmean(_values(calls, "bytes"))))
        rows.append([shortened(name, _NAME_WIDTH), kind, *cells])
    return _table((f"operator ({min(top, len(shown))} of {len(shown)})", "kind", *titles), rows)


def _values(calls: Sequence[Operator | None], *fields: str) -> list[float]:
    """Of each rank the sum of the fields; 0 where it has no such call."""
    return [sum(float(getattr(one, field)) for field in fields) if one is not None else 0.0 for one in calls]
