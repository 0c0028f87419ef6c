"""Facts and findings as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import hvdkit
from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table
from hvdkit.common.units import count_text
from hvdkit.prepare.doctor.facts import CONTROLLERS, PACKAGES, DoctorFacts
from hvdkit.prepare.doctor.finding import LEVELS, Found, has_errors, paragraphs
from hvdkit.prepare.install.facts import TITLES


@dataclass(frozen=True)
class Component:
    """One line of the report.

    Attributes:
        status: "working" (it was imported, or 2 ranks trained with it), "broken", "missing", "not built", "untested".
        version: None where there is none.
        detail: a few words, "" for nothing to add.
    """

    status: str
    version: str | None = None
    detail: str = ""


class DoctorReport(Document, frozen=True):
    """What the doctor found.

    Attributes:
        ok: there is no error.
        components: what a training is made of, by the name that users know it by.
        findings: errors first.
        facts: what they were told from.
    """

    kind = "doctor"
    written_by = "hvdkit doctor --json"
    schema = 3

    ok: bool
    components: dict[str, Component]
    findings: tuple[Found, ...]
    facts: DoctorFacts


def report_of(facts: DoctorFacts, findings: Sequence[Found]) -> DoctorReport:
    """The report for programs."""
    return DoctorReport(not has_errors(findings), components(facts), tuple(findings), facts)


def page(facts: DoctorFacts, findings: Sequence[Found], width: int) -> Page:
    """The report for people, its findings in lines of at most ``width`` columns where words allow."""
    host = facts.host
    quota = f", a quota of {host.cpu_quota:g} CPUs" if host.cpu_quota is not None else ""
    names = ("component", "status", "version", "detail")
    rows = [[name, row.status, row.version, row.detail] for name, row in components(facts).items()]
    levels = [finding.level for finding in findings]
    counts = [
        count_text(levels.count(level), word) for level, word in zip(LEVELS, ("error", "warning", "note"), strict=True)
    ]
    verdict = "Training works here"
    if has_errors(findings):
        verdict = "Training does not work here"
    elif not facts.trained:
        verdict = "No training was tried"
    return Page(
        [
            f"hvdkit {hvdkit.__version__}, Python {facts.python} in {facts.prefix}, {host.platform}",
            Table("", names, rows, left=names),
            f"cores  {host.cores}, of which this process may use {host.affinity}{quota}",
            f"GPUs   {', '.join(host.gpus) or 'none'}",
            *(f"{name}={value}" for name, value in facts.environ.items()),
            *paragraphs(findings, width),
            "",
            f"{verdict}: {', '.join(counts)}.",
        ]
    )


def components(facts: DoctorFacts) -> dict[str, Component]:
    """What a training is made of, by the name that users know it by."""
    table = {PACKAGES[name]: _package(facts, name) for name in (*TITLES, "keras")}
    table["Horovod"] = _horovod(facts)
    table |= {name: _controller(facts, name) for name in CONTROLLERS}
    if facts.loaded_extensions():
        nccl = facts.built_with("NCCL")
        table["NCCL"] = Component("untested", None, "built in") if nccl else Component("not built")
    table["mpi4py"] = _package(facts, "mpi4py")
    table["mpirun"] = Component("missing")
    for first in facts.mpi_launchers[:1]:
        where = first.path + ("" if first.first_on_path else " (not on PATH)")
        table["mpirun"] = Component("found", str(first), where)
    return table


def _package(facts: DoctorFacts, name: str) -> Component:
    package, devices = facts.packages[name], facts.devices.get(name)
    if not package.present:
        return Component("missing")
    if package.failure:
        return Component("broken", package.distribution_version, "its import fails")
    if package.version is None:
        return Component("untested", package.distribution_version, "not imported, since another import failed")
    detail = f"on {facts.mpi4py_mpi}" if name == "mpi4py" and facts.mpi4py_mpi else ""
    if devices and devices.failure:
        detail = "its devices are unknown"
    elif devices:
        seen = f"{len(devices.gpus)} x {devices.gpus[0]}" if devices.gpus else "no GPU visible"
        detail = f"{devices.build}, {seen}" if devices.build else "CPU build"
    return Component("working", package.version, detail)


def _horovod(facts: DoctorFacts) -> Component:
    """Horovod works where 2 ranks train in every framework that it was built for and that works."""
    package = facts.horovod
    if not package.present:
        return Component("missing")
    built = {name: extension for name, extension in facts.extensions.items() if extension.file}
    detail = f"built for {' and '.join(TITLES[name] for name in built)}" if built else "built for no framework"
    if facts.record is None:
        detail += ", not by 'hvdkit install'"
    unloaded = any(facts.packages[name].works and not extension.loaded for name, extension in built.items())
    untrained = any(facts.launch_problem(name) for name in built)
    status = "working" if facts.trained else "untested"
    if package.failure or not built or unloaded or untrained:
        status = "broken"
    return Component(status, package.installed_version, detail)


def _controller(facts: DoctorFacts, name: str) -> Component:
    """MPI or Gloo as Horovod has it: 2 ranks trained over it, or not."""
    library = facts.horovod_mpi() if name == "MPI" else None
    version = str(library) if library else None
    over = [framework for framework, trained in facts.trained.items() if trained.controller == name]
    failed = [TITLES[framework] for framework in over if facts.launch_problem(framework)]
    if failed:
        return Component("broken", version, f"2 ranks do not train over it in {' and '.join(failed)}")
    if over:
        frameworks = " and ".join(TITLES[framework] for framework in over)
        return Component("working", version, f"2 ranks train over it in {frameworks}")
    if not facts.loaded_extensions():
        return Component("untested")
    return Component("untested", version, "built in") if facts.built_with(name) else Component("not built")
