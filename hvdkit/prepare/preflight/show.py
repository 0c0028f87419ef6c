"""A preflight's result for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdkit.common import json_files
from hvdkit.common.json_files import Document
from hvdkit.prepare.doctor.finding import Finding, Found, found_as
from hvdkit.prepare.preflight.report import Place, Report

_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}
Findings = Sequence[tuple[str, Finding]]


def has_errors(findings: Findings) -> bool:
    """Whether training would not work."""
    return any(finding.level == "error" for _, finding in findings)


class Seen(Document, frozen=True):
    """What the ranks of a job see.

    Attributes:
        ok: the job can train.
        findings: errors first.
        ranks: of each rank its ``rank``, ``device`` (None without one), and what it saw of itself: see
            ``preflight.report.Report``.
    """

    kind = "preflight"
    written_by = "hvdkit preflight --json"

    ok: bool
    findings: tuple[Found, ...]
    ranks: tuple[Report, ...]


def as_json(reports: Sequence[Report], findings: Findings) -> str:
    """One JSON object."""
    return json_files.encode(Seen(not has_errors(findings), found_as(findings), tuple(reports)))


def print_text(reports: Sequence[Report], findings: Findings, console: Console) -> None:
    """A table of the ranks, the findings, and a verdict."""
    ways = sorted({f"{report.launcher} starts the ranks, Horovod over {report.library or '?'}" for report in reports})
    console.print(Text("; ".join(ways)), soft_wrap=True)
    table = Table("rank", "host", "launcher", "Horovod", "MPI", "GPU", "cores", "threads")
    for report in reports:
        table.add_row(
            str(report.rank),
            Text(report.host),
            _place(report.launched),
            _place(report.horovod),
            _place(report.mpi),
            Text(report.device or ("none" if not report.devices else "none left")),
            str(len(report.cores)),
            str(report.threads),
        )
    console.print(table)
    for name, finding in findings:
        console.print(Text(f"{finding.level} [{name}]", style=_COLOURS[finding.level]))
        for label in ("what", "why", "fix"):
            console.print(Text(f"  {label}: {getattr(finding, label)}"), soft_wrap=True)
    size = max(report.size for report in reports)
    verdict = "The job would not train as it is" if has_errors(findings) else "The job can train"
    console.print(Text(f"{verdict}: {len(reports)} of {size} ranks, {len(findings)} findings."), soft_wrap=True)


def _place(place: Place) -> str:
    return "-" if place.rank is None else f"{place.rank} of {place.size}"
