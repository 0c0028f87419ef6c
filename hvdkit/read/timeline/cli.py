"""The command ``hvdkit timeline``, and what ``summary`` prints; ``merge`` is in the room of traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from hvdkit.common.commands import AT_LEAST_0, PATH, group_of, print_any_name
from hvdkit.common.files import replacing
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, duration_text, number_text, share_text, shortened
from hvdkit.read.causes import verdict
from hvdkit.read.timeline.reader import GROUPS, read
from hvdkit.read.timeline.results import Distribution, TensorSummary, TimelineSummary, otherwise
from hvdkit.read.timeline.summary import nothing_in, summarize

SUBCOMMANDS = {
    "summary": ("hvdkit.read.timeline.cli:summary", "Where the time went, in numbers, and what to try."),
    "report": ("hvdkit.read.timeline.cli:report", "Write one HTML page, to zoom into."),
    "merge": ("hvdkit.read.trace.cli:merge", "Merge it with a trace of torch.profiler."),
}

_MOVED = {
    "diff": "hvdkit diff A B",
    "slice": "hvdkit timeline report FILE -o HTML --step K",
    "export": "https://ui.perfetto.dev",
}


@click.group(cls=group_of(SUBCOMMANDS, moved=_MOVED))
def timeline() -> None:
    """Read a timeline of Horovod (HOROVOD_TIMELINE): where did the time go, and what to try?

    Reads any such file, also compressed with gzip, cut off or damaged. Rank 0 writes it:

    \b
      hvdkit launch -n 4 --timeline timeline.json -- python train.py
      hvdkit timeline summary timeline.json

    Each subcommand has its own --help with an example.
    """
    print_any_name()


@click.command()
@click.argument("file", type=PATH)
@click.option("--top", type=AT_LEAST_0, default=10, metavar="N", help="Tensors to list.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object; times in seconds, sizes in bytes.")
def summary(file: Path, top: int, form: str | None) -> int:
    """Name what costs a job time and what to try, then show where the time went, in numbers.

    Steps are found from the tensors that are reduced again and again; the first step is shown apart. Communication
    is the time in which at least one collective ran: fused tensors, which Horovod writes once each, count once.

    \b
    Examples:
      hvdkit timeline summary timeline.json
      hvdkit timeline summary timeline.json.gz --top 3
      hvdkit timeline summary timeline.json --json > summary.json

    Exit status: 0 success, 1 no operation of Horovod in it, 2 for bad usage or no such file.
    """
    found = summarize(file)
    if not found.operations:
        raise nothing_in(file, found)
    page(found, top).print(form, found)
    return 0


@click.command()
@click.argument("file", type=PATH)
@click.option("-o", "output", type=PATH, required=True, metavar="HTML", help="The page to write.")
@click.option("--step", type=AT_LEAST_0, metavar="K", help="Show this training step, from 0  [default: usual steps]")
def report(file: Path, output: Path, step: int | None) -> int:
    """Write one HTML page about a recording, which opens from disk and loads nothing.

    It holds the summary, what to try, the time of each step and the phases of each tensor. These are about the whole
    recording. Some steps of it are shown operation by operation, to zoom into.

    \b
    Examples:
      hvdkit timeline report timeline.json -o report.html
      hvdkit timeline report timeline.json.gz -o report.html --step 20

    Exit status: 0 success, 1 no operation of Horovod in it, 2 for bad usage or no such file.
    """
    from hvdkit.read.timeline.report import render_report  # needs the extra

    recording = read(file)
    with replacing(output, file) as page:
        page.write(render_report(recording, step).encode("utf-8", "replace"))
    click.echo(f"{output}: {output.stat().st_size / 1000:.0f} kB")
    return 0


def page(summary: TimelineSummary, top: int) -> Page:
    """The summary for people, the verdict first, with so many tensors."""
    found: list[Table | str] = [*verdict(summary.causes, otherwise(summary)), ""]
    found += [f"{label:<16}{text}" for label, text in lines(summary)]
    if top:
        found.append(tensor_table(summary.tensors[:top], len(summary.tensors)))
    return Page(found)


def lines(summary: TimelineSummary) -> list[tuple[str, str]]:
    """The numbers of a recording, title and text each: the lines above the tables, and the top of the page."""

    def of_all(time: float, what: str) -> str:
        return f"{duration_text(time)} ({share_text(time / (summary.duration or 1.0))}) {what}"

    steps, batches = summary.steps, summary.batches
    ranks = summary.ranks or "unknown number of"
    operations = f"{summary.operations} operations on {len(summary.tensors)} tensors, {ranks} ranks"
    communication = of_all(summary.communication, "in collectives")
    if summary.setup:
        communication = f"{communication}, " + of_all(summary.setup, "in NCCL's set-up")
    found = [("recording", f"{duration_text(summary.duration)}, {operations}"), ("communication", communication)]
    if steps is None:
        found.append(("steps", "none found: no gradient is reduced three times"))
    else:
        size = "unknown size" if steps.bytes is None else bytes_text(steps.bytes)
        found.append(("steps", f"{steps.count} of {steps.tensors} tensors, {size} each"))
        if steps.first is not None:
            found.append(("first step", duration_text(steps.first)))
        parts = {"other steps": steps.duration, "  exchange": steps.communication, "  no operation": steps.idle}
        found += [(label, _percentiles(part)) for label, part in parts.items() if part is not None]
    if batches is not None:
        text = f"{batches.fused} fused"
        if batches.tensors is not None and batches.bytes is not None:
            text += f", each {batches.tensors.p50:.0f} tensors and {bytes_text(batches.bytes.p50)} in the median"
        found.append(("exchanges", f"{text}, {batches.single} of one tensor"))
    if summary.cycle is not None:
        found.append(("cycles", f"{summary.cycle.count}: {_percentiles(summary.cycle)}"))
    if summary.costs is None:
        late = "not known: record with hvdkit launch --timeline FILE --skew (horovodrun: --cache-capacity 0)"
    else:
        most = sorted(summary.costs.items(), key=lambda pair: -pair[1])[:4]
        late = ", ".join(f"rank {rank} costs a step {duration_text(cost)}" for rank, cost in most)
    found.append(("late ranks", late))
    dropped = ", ".join(f"{count} x {reason}" for reason, count in summary.dropped.items())
    found.append(("dropped", f"{dropped} (of {summary.events} events)" if dropped else "nothing"))
    return found


def _percentiles(part: Distribution) -> str:
    return (
        f"p50 {duration_text(part.p50)}, p95 {duration_text(part.p95)}, p99 {duration_text(part.p99)}, "
        f"max {duration_text(part.max)}"
    )


def tensor_table(tensors: Sequence[TensorSummary], of: int, width: int = 40) -> Table:
    """What the phases of some tensors took, of so many in all; names have at most ``width`` characters."""

    def phase(group: str) -> Callable[[TensorSummary], str]:
        def cell(tensor: TensorSummary) -> str:
            part = tensor.phases.get(group)
            return "" if part is None else f"{number_text(part.p50 / 1000)} / {number_text(part.p99 / 1000)}"

        return cell

    cells: dict[str, Callable[[TensorSummary], object]] = {
        f"tensor ({len(tensors)} of {of})": lambda tensor: shortened(tensor.tensor, width),
        "kind": lambda tensor: tensor.role or tensor.kind.lower(),
        "count": lambda tensor: tensor.count,
        "bytes": lambda tensor: "?" if tensor.bytes is None else bytes_text(tensor.bytes),
    }
    cells |= {group: phase(group) for group in (*GROUPS, "whole") if any(group in tensor.phases for tensor in tensors)}
    note = "each phase: median / 99th percentile in ms; bytes: of the largest operation"
    return Table.of(tensors, cells, list(cells)[:2], note=note)
