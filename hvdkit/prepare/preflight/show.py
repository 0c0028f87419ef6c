"""A preflight's result for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table
from hvdkit.prepare.doctor.finding import Found, has_errors
from hvdkit.prepare.preflight.report import Place, RankReport

_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


class PreflightReport(Document, frozen=True):
    """What the ranks of a job see.

    Attributes:
        ok: the job can train.
        findings: errors first.
        ranks: of each rank its ``rank``, ``device`` (None without one), and what it saw of itself: see
            ``preflight.report.RankReport``.
    """

    kind = "preflight"
    written_by = "hvdkit preflight --json"

    ok: bool
    findings: tuple[Found, ...]
    ranks: tuple[RankReport, ...]


def seen(reports: Sequence[RankReport], findings: Sequence[Found]) -> PreflightReport:
    """The same for programs."""
    return PreflightReport(not has_errors(findings), tuple(findings), tuple(reports))


def page(reports: Sequence[RankReport], findings: Sequence[Found]) -> Page:
    """A table of the ranks, the findings, and a verdict."""
    ways = sorted({f"{report.launcher} starts the ranks, Horovod over {report.library or '?'}" for report in reports})
    rows = [
        [
            report.rank,
            report.host,
            _place(report.launched),
            _place(report.horovod),
            _place(report.mpi),
            report.device or ("none left" if report.devices else "none"),
            len(report.cores),
            report.threads,
        ]
        for report in reports
    ]
    names = ("rank", "host", "launcher", "Horovod", "MPI", "GPU", "cores", "threads")
    found: list[Table | str | Text] = ["; ".join(ways), Table("", names, rows, left=names[1:6])]
    for finding in findings:
        found.append(Text(f"{finding.level} [{finding.check}]", style=_COLOURS[finding.level]))
        found += [f"  {label}: {getattr(finding, label)}" for label in ("what", "why", "fix")]
    size = max(report.size for report in reports)
    verdict = "The job would not train as it is" if has_errors(findings) else "The job can train"
    return Page([*found, f"{verdict}: {len(reports)} of {size} ranks, {len(findings)} findings."])


def _place(place: Place) -> str | None:
    return None if place.rank is None else f"{place.rank} of {place.size}"
