"""Facts and findings as text for people and as JSON for programs; neither has the name of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

import hvdkit
from hvdkit.common import json_files
from hvdkit.common.json_files import Document
from hvdkit.common.units import count_text
from hvdkit.prepare.doctor.facts import CONTROLLERS, FRAMEWORKS, PACKAGES, DoctorFacts, Package
from hvdkit.prepare.doctor.finding import LEVELS, Found, explanation, has_errors

_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan", "working": "green", "broken": "red"}
_WORDS = ("error", "warning", "note")  # in the order of LEVELS
_OTHER_OPERATIONS = ("NCCL", "CUDA", "ROCm", "CCL", "DDL")


@dataclass(frozen=True)
class Component:
    """One line of the report.

    Attributes:
        status: "working" (it was imported, or used for an allreduce), "broken", "missing", "not built", "untested".
        version: None where there is none.
        detail: a few words, "" for nothing to add.
    """

    status: str
    version: str | None = None
    detail: str = ""


class DoctorReport(Document, frozen=True):
    """What the doctor found; without the name of the machine.

    Attributes:
        ok: there is no error.
        components: what a training is made of, by the name that users know it by.
        findings: errors first.
        facts: what they were told from.
    """

    kind = "doctor"
    written_by = "hvdkit doctor --json"

    ok: bool
    components: dict[str, Component]
    findings: tuple[Found, ...]
    facts: DoctorFacts


def as_json(facts: DoctorFacts, findings: Sequence[Found]) -> str:
    """The report as one JSON object."""
    return json_files.encode(DoctorReport(not has_errors(findings), components(facts), tuple(findings), facts))


def components(facts: DoctorFacts) -> dict[str, Component]:
    """What a training is made of, by the name that users know it by."""
    table = {PACKAGES[name]: _package(facts, facts.packages[name]) for name in (*FRAMEWORKS, "keras", "jax")}
    table["Horovod"] = _horovod(facts)
    table |= {name: _controller(facts, name) for name in CONTROLLERS}
    if facts.loaded_extensions():
        shown = [name for name in _OTHER_OPERATIONS if name == "NCCL" or facts.built_with(name)]
        built_in, absent = Component("untested", None, "built in"), Component("not built")
        table |= {name: built_in if facts.built_with(name) else absent for name in shown}
    table["mpi4py"] = _mpi4py(facts)
    table["mpirun"] = _mpirun(facts)
    return table


def _package(facts: DoctorFacts, package: Package) -> Component:
    if not package.present:
        return Component("missing")
    if package.failure:
        return Component("broken", package.distribution_version, "its import fails")
    if package.version is None:
        return Component("untested", package.distribution_version, "TensorFlow's import fails")
    if package.name == "keras":
        return Component("working", package.version, f"on {facts.keras_backend}")
    detail, devices = "", facts.devices.get(package.name)
    if devices and devices.failure:
        detail = "its devices are unknown"
    elif devices:
        seen = f"{len(devices.gpus)} x {devices.gpus[0]}" if devices.gpus else "no GPU visible"
        detail = f"{devices.build}, {seen}" if devices.build else "CPU build"
    return Component("working", package.version, detail)


def _horovod(facts: DoctorFacts) -> Component:
    package = facts.horovod
    version = package.installed_version
    if not package.present:
        return Component("missing")
    built = {name: extension for name, extension in facts.extensions.items() if extension.file}
    detail = f"built for {' and '.join(FRAMEWORKS[name] for name in built)}" if built else "built for no framework"
    tried = [extension for name, extension in built.items() if facts.packages[name].works]
    if package.failure or not built or not all(one.loaded and None in one.runs.values() for one in tried):
        return Component("broken", version, detail)
    return Component("working" if tried else "untested", version, detail)


def _controller(facts: DoctorFacts, name: str) -> Component:
    """MPI or Gloo as Horovod has it: an allreduce was done with it, or not."""
    library = facts.horovod_mpi() if name == "MPI" else None
    version = str(library) if library else None
    runs = {
        extension.framework: extension.runs[name] for extension in facts.loaded_extensions() if name in extension.runs
    }
    if not runs:
        return Component("not built" if facts.loaded_extensions() else "untested")
    failed = [FRAMEWORKS[framework] for framework, failure in runs.items() if failure]
    if failed:
        return Component("broken", version, f"an allreduce fails in {' and '.join(failed)}")
    return Component("working", version, f"an allreduce works in {' and '.join(FRAMEWORKS[name] for name in runs)}")


def _mpi4py(facts: DoctorFacts) -> Component:
    package = facts.packages["mpi4py"]
    if not package.present:
        return Component("missing")
    if package.failure or facts.mpi4py_run:
        how = "its import fails" if package.failure else "MPI_Init fails"
        return Component("broken", package.installed_version, how)
    return Component("working", package.version, f"on {facts.mpi4py_mpi}" if facts.mpi4py_mpi else "")


def _mpirun(facts: DoctorFacts) -> Component:
    if not facts.mpi_launchers:
        others = ", ".join(facts.host.schedulers)
        return Component("missing", None, others and f"launchers here: {others}")
    launcher = facts.mpi_launchers[0]
    return Component("found", str(launcher), launcher.path + ("" if launcher.first_on_path else " (not on PATH)"))


def as_text(facts: DoctorFacts, findings: Sequence[Found], width: int) -> str:
    """The report for people, in lines of at most ``width`` columns where words allow; coloured by click's styles."""
    parts = [f"hvdkit {hvdkit.__version__}, Python {facts.python} in {facts.prefix}, {facts.host.platform}", ""]
    parts += _table(components(facts))
    parts += ["", f"  cores     {_cores(facts)}"]
    parts += [f"  GPUs      {', '.join(facts.host.gpus) or 'none'}"]
    parts += [f"  {name}={value}" for name, value in facts.environ.items()]
    for finding in findings:
        head = f"{click.style(finding.level, fg=_COLOURS[finding.level], bold=True)} [{finding.check}]"
        parts += ["", head, *explanation(finding, width)]
    return "\n".join([*parts, "", _summary(findings)])


def _table(rows: Mapping[str, Component]) -> list[str]:
    cells = [(name, row.status, row.version or "-", row.detail) for name, row in rows.items()]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    lines = []
    for name, status, version, detail in cells:
        coloured = click.style(status.ljust(widths[1]), fg=_COLOURS.get(status))
        lines.append(f"  {name.ljust(widths[0])}  {coloured}  {version.ljust(widths[2])}  {detail}".rstrip())
    return lines


def _cores(facts: DoctorFacts) -> str:
    host = facts.host
    quota = f", a quota of {host.cpu_quota:g} CPUs" if host.cpu_quota is not None else ""
    return f"{host.cores}, of which this process may use {host.affinity}{quota}"


def _summary(findings: Sequence[Found]) -> str:
    levels = [finding.level for finding in findings]
    counts = {level: levels.count(level) for level in LEVELS}
    verdict = "Training would not work" if counts["error"] else "Training works here"
    words = [count_text(count, word) for word, count in zip(_WORDS, counts.values(), strict=True)]
    return f"{verdict}: {', '.join(words)}."
