"""A preflight's result for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

import hvdkit
from hvdkit.prepare.doctor.finding import Finding
from hvdkit.prepare.preflight.report import Place, Report

_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}
Findings = Sequence[tuple[str, Finding]]


def has_errors(findings: Findings) -> bool:
    """Whether training would not work."""
    return any(finding.level == "error" for _, finding in findings)


def as_json(reports: Sequence[Report], findings: Findings) -> str:
    """One JSON object."""
    found = [
        {"check": name, "level": one.level, "what": one.what, "why": one.why, "fix": one.fix} for name, one in findings
    ]
    ranks = [{"rank": report.rank, "device": report.device, **report.as_json()} for report in reports]
    whole = {"ok": not has_errors(findings), "hvdkit": hvdkit.__version__, "findings": found, "ranks": ranks}
    return json.dumps(whole, indent=1)


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
