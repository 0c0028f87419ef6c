"""``hvdkit doctor --job``: every rank of a job starts as a training does and says what it sees; rank 0 compares.

That is ``hk.init``, ``hk.pin_device`` and one allreduce on that device: that a rank cannot train is what these say.
Their reports meet over Horovod; where it does not connect the ranks, each process has its own alone. For
``hvdkit launch --preflight``, which outlives the ranks, they are files in a directory, one a rank.
"""

from __future__ import annotations

import importlib
import os
import platform
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table, console
from hvdkit.common.units import count_text
from hvdkit.errors import LauncherError, name_ranks
from hvdkit.prepare.doctor.finding import WIDEST, Found, examine, has_errors, paragraphs
from hvdkit.prepare.install.facts import DISTRIBUTIONS
from hvdkit.prepare.install.here import distribution
from hvdkit.steps import launchers
from hvdkit.steps.bootstrap import loaded_mpi
from hvdkit.steps.device import cpu_threads_here, threads_asked

PACKAGES: tuple[str, ...] = ("hvdkit", *(name for names in DISTRIBUTIONS.values() for name in names), "numpy")
_CPU = "cpu"


@dataclass(frozen=True)
class Place:
    """A rank and the number of ranks, as one of the parties sees them.

    Attributes:
        rank, size: None where it could not be asked.
        error: why; "" where it could.
    """

    rank: int | None = None
    size: int | None = None
    error: str = ""

    def __str__(self) -> str:
        return "-" if self.rank is None else f"{self.rank} of {self.size}"


@dataclass(frozen=True)
class RankReport:
    """One rank of a job.

    Attributes:
        host: name of its host.
        pid: its process.
        launcher: what started it, "none" without a launcher.
        launched, horovod: its place by the launcher's environment and by Horovod.
        problem: why ``hk.init``, ``hk.pin_device`` or the allreduce fails here; "" where they work.
        local_rank: its rank among those of its host, by the launcher or Horovod; None where neither says.
        library: what Horovod communicates through.
        device: what ``hk.pin_device`` gave it: "cpu", or a GPU as its framework calls it.
        cores: the cores that it may run on.
        threads: compute threads that it would use.
        versions: of Python and the packages that it would import.
    """

    host: str
    pid: int
    launcher: str
    launched: Place
    horovod: Place = Place()
    problem: str = ""
    local_rank: int | None = None
    library: str = ""
    device: str = ""
    cores: tuple[int, ...] = ()
    threads: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)

    also: ClassVar[tuple[str, ...]] = ("rank",)
    """Properties that JSON has, too."""

    @property
    def rank(self) -> int:
        """The rank that it was started as."""
        return next((place.rank for place in (self.launched, self.horovod) if place.rank is not None), 0)

    @property
    def size(self) -> int:
        """The number of ranks that were started."""
        return next((place.size for place in (self.launched, self.horovod) if place.size is not None), 1)


Reports = Sequence[RankReport]


class JobReport(Document, frozen=True):
    """What the ranks of a job see.

    Attributes:
        ok: the job can train.
        findings: errors first.
        ranks: of each rank its ``rank``, and what it saw of itself.
    """

    kind = "doctor-job"
    schema = 2
    written_by = "hvdkit doctor --job --json"

    ok: bool
    findings: tuple[Found, ...]
    ranks: tuple[RankReport, ...]


# The command ----------------------------------------------------------------------------------------------------------


def examine_job(timeout_s: float, *, as_json: bool, report_to: Path | None) -> int:
    """Meet the other ranks, and on rank 0 print what all see and what is wrong with it; the exit status.

    A rank that meets no other prints why.

    Args:
        timeout_s: seconds until a rank that the others do not join ends.
        as_json: print one JSON object.
        report_to: leave the report of this rank there for ``could_train``, and print nothing.
    """
    own = look(os.environ)
    if report_to is not None:  # should the rank hang or die, this is what is known of it
        write(report_to, replace(own, problem="init, pin_device or a first allreduce has not returned."))
    watch = threading.Timer(timeout_s, _give_up, (own.rank, own.size, timeout_s))
    watch.daemon = True
    watch.start()
    reports = meet(own)
    watch.cancel()
    if report_to is not None:
        write(report_to, next(one for one in reports if one.rank == own.rank))
        return 0
    found = examine(CHECKS, reports)
    if own.rank == 0:
        document = JobReport(not has_errors(found), tuple(found), tuple(reports))
        page(reports, found).print("json" if as_json else None, document)
    elif len(reports) == 1:  # rank 0 does not hear of it
        sys.stderr.write(f"hvdkit doctor: rank {own.rank} of {own.size} ({own.host}): {reports[0].problem}\n")
    return 1 if has_errors(found) else 0


def arguments(directory: str) -> tuple[str, ...]:
    """What each rank of a job gives its Python, so that ``could_train`` finds their reports in ``directory``."""
    return ("-P", "-m", "hvdkit.cli", "doctor", "--job", "--report-to", directory)


def could_train(directory: Path) -> bool:
    """Print to standard error what the ranks left in a directory, and what is wrong with it; whether they can train."""
    reports = _by_rank(file.read_text(encoding="utf-8") for file in directory.glob("rank-*.json"))
    if not reports:
        console(stderr=True).print("hvdkit doctor: no rank left a report; their errors are above.")
        return False
    found = examine(CHECKS, reports)
    page(reports, found).show(console(stderr=True))
    return not has_errors(found)


def page(reports: Reports, findings: Sequence[Found]) -> Page:
    """A table of the ranks, the findings, and a verdict."""
    ways = sorted({f"{report.launcher} starts the ranks, Horovod over {report.library or '?'}" for report in reports})
    names = ("rank", "host", "launcher", "Horovod", "device", "cores", "threads")
    rows = [
        (one.rank, one.host, one.launched, one.horovod, one.device or None, len(one.cores), one.threads)
        for one in reports
    ]
    size = max(report.size for report in reports)
    verdict = "The job cannot train as it is" if has_errors(findings) else "The job can train"
    return Page(
        [
            "; ".join(ways),
            Table("", names, rows, left=names[1:5]),
            *paragraphs(findings, WIDEST)[1:],
            *([""] if findings else []),
            f"{verdict}: {len(reports)} of {size} ranks, {count_text(len(findings), 'finding')}.",
        ]
    )


def _give_up(rank: int, size: int, timeout_s: float) -> None:
    sys.stderr.write(
        f"hvdkit doctor: rank {rank} of {size} has not met the others after {timeout_s:g} s; look for errors of other "
        "ranks above, check that every host has this environment and that they reach each other.\n"
    )
    sys.stderr.flush()
    os._exit(1)


# One rank -------------------------------------------------------------------------------------------------------------


def look(environ: Mapping[str, str]) -> RankReport:
    """This process before it has met the others."""
    found, launched = None, Place()
    try:
        if found := launchers.detect(environ):
            launched = Place(found.rank, found.size)
    except LauncherError as error:
        launched = Place(error=str(error))
    installed = {name: package.version for name in PACKAGES if (package := distribution(name))}
    return RankReport(
        host=socket.gethostname(),
        pid=os.getpid(),
        launcher=found.launcher if found else "none",
        launched=launched,
        local_rank=found.local_rank if found else None,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=threads_asked(environ) or cpu_threads_here((found.local_size if found else None) or 1),
        versions={"Python": platform.python_version(), "executable": sys.executable, **installed},
    )


def meet(own: RankReport) -> list[RankReport]:
    """Start as a training does, in the first framework that Horovod loads in; the reports of all ranks that meet."""
    errors = []
    for name in ("torch", "tensorflow"):
        try:
            hk: Any = importlib.import_module(f"hvdkit.{name}")
        except Exception as error:  # an extension can fail to load in any way, and each is a finding
            errors.append(_first_line(error))
            continue
        problem = device = pinned = ""
        try:
            pinned = hk.pin_device(hk.init())
            device = _CPU if _CPU in str(pinned).lower() else str(pinned)
        except Exception as error:  # whatever would stop a training, which is what this is here to find out
            problem = _first_line(error)
        hvd: Any = importlib.import_module(f"horovod.{name}")
        if not hvd.is_initialized():
            return [replace(own, problem=problem)]
        if not any(hvd.allgather_object(problem, name="hvdkit.doctor.problem")):  # or one would not come, and all wait
            problem = _reduces(name, hvd, pinned)
        started = replace(
            own,
            problem=problem,
            device=device,
            horovod=Place(hvd.rank(), hvd.size()),
            library=(loaded_mpi() or "MPI") if hvd.mpi_enabled() else "Gloo",
            local_rank=hvd.local_rank() if own.local_rank is None else own.local_rank,
        )
        return _by_rank(hvd.allgather_object(_text(started), name="hvdkit.doctor"))
    return [replace(own, problem=" ".join(errors))]


def write(directory: Path, own: RankReport) -> None:
    """Leave this rank's report, complete or not at all."""
    file = directory / f"rank-{own.rank}.json"
    file.with_suffix(".part").write_text(_text(own), encoding="utf-8")
    file.with_suffix(".part").rename(file)


def _text(report: RankReport) -> str:
    return msgspec.json.encode(report).decode()


def _by_rank(texts: Iterable[str]) -> list[RankReport]:
    return sorted((msgspec.json.decode(text, type=RankReport) for text in texts), key=lambda report: report.rank)


def _reduces(name: str, hvd: Any, device: Any) -> str:
    """Why the ranks' sum of ones, on the device that a framework has pinned, is not their number; "" where it is."""
    framework: Any = importlib.import_module(name)
    try:
        if name == "torch":
            ones = framework.ones(1, device=device)
        else:
            with framework.device(device):
                ones = framework.ones(1)
        total = float(hvd.allreduce(ones, op=hvd.Sum, name="hvdkit.doctor.sum")[0])
    except Exception as error:  # as above
        return _first_line(error)
    return "" if total == hvd.size() else f"an allreduce of a one from each of {hvd.size()} ranks gives {total:g}."


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# The table ------------------------------------------------------------------------------------------------------------


def _start(reports: Reports) -> Iterator[Found]:
    """Ranks that cannot start, or that have left no report."""
    problems = dict.fromkeys(report.problem for report in reports if report.problem)
    for problem in problems:
        failed = [report for report in reports if report.problem == problem]
        host = failed[0].host
        yield Found(
            "start",
            "error",
            f"Training does not start on {_ranks(failed)} ({host}): {problem}",
            "This is what init, pin_device or a first allreduce says there; a training stops in the same way.",
            f"Do what it says; `hvdkit doctor` on {host}, in the environment of the job, tells more.",
        )
    size = max(report.size for report in reports)
    absent = sorted(set(range(size)) - {report.rank for report in reports})
    if absent and not problems:
        yield Found(
            "missing-ranks",
            "error",
            f"There is no report from {name_ranks(absent)} of {size}.",
            "They did not start, or cannot be reached from the others.",
            "Look for their errors above; on several hosts check that each has this Python environment.",
        )


def _some_without_gpu(reports: Reports) -> Iterator[Found]:
    blind = [report for report in reports if report.device == _CPU]
    if blind and any(report.device not in ("", _CPU) for report in reports):
        yield Found(
            "gpus",
            "error",
            f"{_ranks(blind)}: on the CPU, the other ranks on GPUs.",
            "Horovod refuses a sum over tensors of which some are on a GPU.",
            "Ask the scheduler for GPUs on every node, and check CUDA_VISIBLE_DEVICES and the driver there.",
        )


def _other_versions(reports: Reports) -> Iterator[Found]:
    for name in ("Python", *PACKAGES):
        by_version: dict[str, list[RankReport]] = {}
        for report in reports:
            by_version.setdefault(report.versions.get(name, "missing"), []).append(report)
        if len(by_version) > 1:
            shown = "; ".join(f"{version} on {_ranks(those)}" for version, those in by_version.items())
            yield Found(
                "versions",
                "warning",
                f"{name} is not the same on all ranks: {shown}.",
                "Ranks with different versions may compute different gradients, or not understand each other; where a "
                "package is missing, a script that imports it fails, and the other ranks wait.",
                "Use the same environment on every host: a shared file system, or install it there too.",
            )


def _few_cores(reports: Reports) -> Iterator[Found]:
    for host in dict.fromkeys(report.host for report in reports):
        here = [report for report in reports if report.host == host]
        cores = len({core for report in here for core in report.cores})
        threads = sum(report.threads for report in here)
        if threads > cores:
            run = f"{count_text(len(here), 'rank')} on {host} would run {count_text(threads, 'thread')}"
            yield Found(
                "cores",
                "warning",
                f"{run} on {count_text(cores, 'core')}.",
                "Threads that wait for a core slow every rank down; times measure contention, not scaling.",
                f"Set OMP_NUM_THREADS={max(1, cores // len(here))} (hvdkit launch --threads), start fewer ranks a host "
                "(--ppn), or ask for more cores.",
            )


def _ranks(reports: Reports) -> str:
    return name_ranks(sorted(report.rank for report in reports))


CHECKS = (_start, _some_without_gpu, _other_versions, _few_cores)
