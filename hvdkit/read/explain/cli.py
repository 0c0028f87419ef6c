"""``hvdkit explain``: all recordings of a job to one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from hvdkit.common import files, json_files
from hvdkit.common.json_files import Document
from hvdkit.common.table import Page
from hvdkit.common.units import count_text, duration_text, printable, share_text
from hvdkit.errors import DataError, HvdkitError
from hvdkit.observe import step_files
from hvdkit.read.causes import Cause, by_cost
from hvdkit.read.explain import exchange, step_causes
from hvdkit.read.explain.sources import LAUNCH, MPI, STALL, STEPS, TIMELINE, TRACE, JobLaunch, Read, find
from hvdkit.read.explain.step_table import StepTable

LINES = 10
"""At most; the verdict first."""
_FURTHER = 3
"""Causes after the first one that are said."""
_UNTOLD = 3
LATE = frozenset(
    {"input", "compute", "host", "late", "random-late", "blocked", "affinity", "pause", "gc", "growth", "first-steps"}
)
"""Causes by which a rank comes late; the times of the steps tell them apart, a timeline often cannot."""
_LONGEST = 300
"""Characters of a stall report that are shown."""


class Explanation(Document, frozen=True):
    """What costs a job time, the most costly cause first; none where nothing is wrong as far as can be told.

    Attributes:
        ranks: of the job; None where no recording says it.
        steps: that count in the times of the steps; None without these.
        step_s: seconds of one, the mean; None without these.
        accounts: where the whole recorded time went, seconds by name, which add up to it; empty without the times of
            the steps.
        causes: what recurs in every step first, then what happens once.
        untold: what could not be told and what to record for it, full sentences.
        read: the recordings.
        stalled: who did not arrive where, a full sentence; None for a job without stall reports.
    """

    kind = "explanation"
    written_by = "hvdkit explain --json"

    ranks: int | None
    steps: int | None
    step_s: float | None
    accounts: dict[str, float]
    causes: tuple[Cause, ...]
    untold: tuple[str, ...]
    read: tuple[Read, ...]
    stalled: str | None


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="FILE|DIR...")
@click.option("--json", "form", flag_value="json", help="Print one JSON object; times in seconds.")
def explain(paths: tuple[Path, ...], form: str | None) -> int:
    """Name what costs a job most time: how much, the evidence and the fix, in at most ten lines.

    Reads the recordings of one job: the times of its steps, Horovod's timeline, PyTorch's traces, MPI profiles,
    stall reports, how it was launched. DIR stands for all of these in it. Causes are weighed by the time that they
    cost. A straggler counts from 4 % of it, input of all ranks from 10 %, the allreduce from 20 %.

    \b
    Examples:
      hvdkit launch -n 4 --explain-job -- python train.py
      hvdkit explain hvdkit-job-20250131-120000
      hvdkit explain timeline.json profile --json

    Exit status: 0 success, whatever was found; 1 nothing of a job can be read there; 2 for bad usage.
    """
    found = explained(paths)
    Page(lines(found)).print(form, found)
    return 0


def explained(paths: Sequence[Path]) -> Explanation:
    """What costs a job time.

    Args:
        paths: recordings, and directories with them.
    Raises:
        DataError: there are none, or none can be read.
        InvalidArgumentError: there are those of several jobs.
    """
    sources = find(paths)
    job, read, errors = _Job(), list[Read](), list[str]()
    for what, look in _TOOLS.items():
        if not (files_of_it := sources.get(what)):
            continue
        place = files_of_it[0] if len(files_of_it) == 1 and what != STEPS else files_of_it[0].parent
        try:
            causes, says = look(job, files_of_it)
        except HvdkitError as error:
            errors.append(str(error))
            continue
        read.append(Read(str(place), what, says))
        for cause in causes:
            job.add(cause, place.name)
    if errors and all(one.what == LAUNCH for one in read):
        raise DataError(errors[0])
    stalled = None
    if stacks := sources.get(STALL):
        said = [printable(files.text_if_there(path).partition("\n")[0]) for path in stacks]
        missing = dict.fromkeys(line for line in said if "did not arrive" in line) or said[:1]
        stalled = f"The job stalled: {'; '.join(missing)[:_LONGEST]}. The stacks are in {stacks[0].parent}."
        read.append(Read(str(stacks[0].parent), STALL, f"{len(stacks)} ranks"))
    steps = job.steps
    if steps is None:
        job.untold.append(
            "Without the times of the steps nothing is known of each rank's input and computation: start the job with "
            "'hvdkit launch --explain-job'."
        )
    return Explanation(
        ranks=steps.size if steps else job.launched.ranks if job.launched else None,
        steps=steps.steps if steps else None,
        step_s=steps.step_s if steps else None,
        accounts=steps.accounts() if steps else {},
        causes=tuple(sorted(by_cost(job.causes), key=lambda cause: not cause.recurs)),
        untold=(*job.untold, *errors),
        read=tuple(read),
        stalled=stalled,
    )


@dataclass
class _Job:
    """What the recordings say, as they are read: those that see more of a cause come first."""

    launched: JobLaunch | None = None
    steps: StepTable | None = None
    causes: list[Cause] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    settled: frozenset[str] = frozenset()
    """Kinds of which all has been said."""

    def add(self, cause: Cause, place: str) -> None:
        """A cause that is not there yet; one that is there gets a further witness."""
        if place not in cause.evidence:
            cause = replace(cause, evidence=f"{place}: {cause.evidence}")
        timed = self.steps is not None and self.steps.ready
        for at, other in enumerate(self.causes):
            others = bool(cause.ranks and other.ranks) and {*cause.ranks}.isdisjoint(other.ranks)
            late = cause.kind in LATE and other.kind in LATE and (timed or _same_delay(cause, other))
            if not others and (late or cause.kind == other.kind):
                if other.kind == "late" != cause.kind and other.ranks == cause.ranks:  # and now it is known why
                    other = replace(other, kind=cause.kind, what=cause.what, advice=cause.advice)
                if place not in other.evidence:
                    other = replace(other, evidence=f"{other.evidence.rstrip('.')}. So says {place}.")
                self.causes[at] = other
                return
        if cause.kind not in self.settled:
            self.causes.append(cause)


def _of_launch(job: _Job, paths: Sequence[Path]) -> tuple[list[Cause], str]:
    job.launched = found = json_files.read(paths[0], JobLaunch)
    threads = {None: "", 1: ", 1 thread each"}.get(found.threads, f", {found.threads} threads each")
    return [], f"{found.ranks} ranks by {found.launcher}{threads}"


def _of_steps(job: _Job, paths: Sequence[Path]) -> tuple[list[Cause], str]:
    """The times of the steps, whose causes stand as they are: no other recording was looked at before."""
    directory = paths[0].parent
    steps, job.causes, job.untold = step_causes.look(step_files.read(directory), directory, job.launched)
    job.settled = LATE if steps.ready else frozenset()
    job.steps = steps
    return [], f"{steps.steps} steps of {steps.size} ranks"


def _of_timeline(job: _Job, paths: Sequence[Path]) -> tuple[list[Cause], str]:
    """What Horovod's timeline says, by the clock of the steps where there are any."""
    from hvdkit.read.timeline.columns import collect
    from hvdkit.read.timeline.reader import read
    from hvdkit.read.timeline.summary import summarize

    recording = read(paths[0])
    columns = collect(recording)
    summary = summarize(recording, columns)
    if not summary.operations:
        raise DataError(f"{paths[0]} holds no operation of Horovod.")
    exact = None
    if job.steps is not None and job.steps.waits is not None and summary.start_time_since_epoch is not None:
        exact = exchange.causes(columns, summary.start_time_since_epoch, job.steps.waits, paths[0])
    if exact is not None:
        job.settled |= exchange.KINDS
        exact = [cause for cause in exact if cause.kind not in {one.kind for one in job.causes}]  # recorded by name
        whole = next((cause for cause in job.causes if cause.kind == "exchange" and cause.per_step), None)
        if whole is not None:  # what a timeline explains of the exchange is no longer said of the whole of it
            left = max(0.0, whole.lost_s - sum(cause.lost_s for cause in exact))
            rest = replace(whole, lost_s=left, share=whole.share * left / whole.lost_s)
            at = job.causes.index(whole)
            job.causes[at : at + 1] = [rest] if left > 0.5 * whole.lost_s else []
        job.causes += exact
    elif job.steps is not None and None not in job.steps.hosts and len({*job.steps.hosts}) > 1:
        for at, one in enumerate(job.causes):  # within a host compression costs time
            saves = exchange.compression(summary, one.lost_s, job.steps.step_s) if one.kind == "exchange" else ""
            job.causes[at] = replace(one, advice=f"{saves}{one.advice}")
    return list(summary.causes), f"{summary.operations} operations"


def _of_traces(_: _Job, paths: Sequence[Path]) -> tuple[list[Cause], str]:
    from hvdkit.read.trace.summary import summarize

    summary = summarize(paths)
    return list(summary.causes), f"{len(summary.ranks)} ranks"


def _of_mpi(_: _Job, paths: Sequence[Path]) -> tuple[list[Cause], str]:
    from hvdkit.read.mpi_profile import reading
    from hvdkit.read.mpi_profile.results import causes

    profile = reading.read(paths)
    return causes(profile, profile.ranks[0]), f"{len(profile.ranks)} ranks"


_TOOLS = {LAUNCH: _of_launch, STEPS: _of_steps, TIMELINE: _of_timeline, TRACE: _of_traces, MPI: _of_mpi}
"""What reads each recording, in the order in which they know more of a cause."""


def _same_delay(cause: Cause, known: Cause) -> bool:
    """Whether a later witness, which may not name a rank, means the rank that is known to be late."""
    unnamed = cause.kind == "late" and not cause.ranks
    return not {*known.ranks}.isdisjoint(cause.ranks) or (unnamed and 2 * known.share >= cause.share)


def lines(found: Explanation) -> list[str]:
    """What is printed."""
    if not found.causes and found.stalled is None:
        first = [step_causes.NOTHING_FOUND if found.steps else "No cause of lost time was found."]
    else:
        first = [] if found.stalled is None else [found.stalled]
        for cause in found.causes[:1]:
            first += [cause.sentence(), f"  Seen in {cause.evidence}", f"  {cause.advice}"]
    further = [f"Also: {cause.sentence()} {cause.advice}" for cause in found.causes[1 : 1 + _FURTHER]]
    left = len(found.causes) - 1 - _FURTHER
    untold = [f"Not told: {sentence}" for sentence in found.untold[:_UNTOLD]]
    more = [f"{count_text(left, 'smaller cause')} {'is' if left == 1 else 'are'} in --json."] if left > 0 else []
    read = ", ".join(f"{one.what} ({one.says})" for one in found.read)
    step = "" if found.step_s is None else f"; a step takes {duration_text(1e6 * found.step_s)}"
    accounts = []
    if found.accounts:
        whole = sum(found.accounts.values()) or 1.0
        parts = sorted(found.accounts.items(), key=lambda part: -part[1])
        words = ", ".join(f"{name} {share_text(seconds / whole)}" for name, seconds in parts if seconds >= 0.01 * whole)
        shown = found.causes[: 1 + _FURTHER]
        explained = sum((found.steps or 0) * cause.lost_s if cause.per_step else cause.lost_s for cause in shown)
        named = f"the causes above explain {share_text(min(1.0, explained / whole))}" if shown else "no cause named"
        accounts = [f"Of {duration_text(1e6 * whole)}: {words}; {named}."]
    room = LINES - len(first) - len(further) - len(more) - len(accounts) - 1
    said = [*first, *further, *more, *accounts, *untold[:room], f"Read: {read}{step}."]
    return [printable(line) for line in said]
