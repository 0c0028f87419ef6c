"""The command ``hvdkit doctor``: facts and findings as text for people and as JSON for programs."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

import hvdkit
from hvdkit.common import masked
from hvdkit.common.commands import JSON, time_limit
from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table
from hvdkit.common.units import count_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.prepare.doctor import job as ranks
from hvdkit.prepare.doctor.checks import CHECKS
from hvdkit.prepare.doctor.facts import CONTROLLERS, PACKAGES, DoctorFacts
from hvdkit.prepare.doctor.finding import LEVELS, WIDEST, Found, examine, has_errors, paragraphs
from hvdkit.prepare.doctor.probe import DEFAULT_SECONDS, gather
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


@click.command()
@JSON
@click.option(
    "--report",
    is_flag=True,
    help="Print the text to be pasted: without colours, host and user names, tokens and keys.",
)
@click.option("--job", is_flag=True, help="Inside a job, on every rank: can its ranks train together?")
@click.option("--report-to", type=click.Path(file_okay=False, exists=True, path_type=Path), hidden=True)
@time_limit(
    DEFAULT_SECONDS,
    "Time limit of each import, and with --job for all ranks to join; raise it on a slow network file system.",
)
def doctor(json_: bool, report: bool, job: bool, report_to: Path | None, timeout: float) -> int:
    """Report what is installed, what does not fit together and how to fix it.

    Looks at the environment that `hvdkit` itself runs in. It imports each framework, Horovod and mpi4py in a process of
    its own: a crash or a hang there becomes a finding. Then `hvdkit launch` trains on 2 ranks in each framework that
    Horovod loads in. "Training works here" means that this was done. Takes about half a minute; changes nothing.

    \b
    It compares
      the frameworks with those that Horovod was built for (drift),
      the MPI of Horovod with those of mpi4py and of mpirun (every process is rank 0),
      the accelerators and cores that there are with those that training would use,
      OMP_NUM_THREADS with the cores that there are.

    With --job it looks at a job from inside. Start it as the training will be started, on every rank; or let `hvdkit
    launch --preflight` do that. Every rank takes the first two steps (init, pin_device) and reports its rank by the
    launcher and by Horovod, its host, GPU, cores, threads and versions. Rank 0 prints them.

    Each finding says what, why and fix. An error means that training does not work. A warning means that it works
    badly, or not in every case.

    \b
    Examples:
      hvdkit doctor
      hvdkit doctor --report
      hvdkit doctor --json > doctor.json
      srun hvdkit doctor --job
      mpirun -n 4 hvdkit doctor --job --json > job.json

    The JSON object has "ok", "hvdkit", "findings" (check, level, what, why, fix), and "components" (name to status,
    version, detail) with "facts" (everything that was found), or "ranks" with --job.

    Exit status: 0 without errors, 1 with an error, 2 for bad usage.
    """
    if job or report_to:
        if report:
            raise InvalidArgumentError("--report is about one machine; leave it or --job out.")
        return ranks.examine_job(timeout, as_json=json_, report_to=report_to)
    if json_ and report:
        raise InvalidArgumentError("--json and --report are two forms of one report; give one of them.")
    facts = gather(seconds=timeout)
    findings = examine(CHECKS, facts)
    if report:
        text = io.StringIO()
        page(facts, findings, WIDEST).show(Console(file=text, width=2 * WIDEST, color_system=None, highlight=False))
        click.echo(masked.without_names(text.getvalue()), nl=False)
    else:
        width = shutil.get_terminal_size().columns
        report_ = DoctorReport(not has_errors(findings), components(facts), tuple(findings), facts)
        page(facts, findings, width).print("json" if json_ else None, report_)
    return 1 if has_errors(findings) else 0


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
    unloaded = any(
        facts.packages[name].present and not facts.packages[name].failure and not extension.loaded
        for name, extension in built.items()
    )
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
