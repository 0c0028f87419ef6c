"""All recordings of a job to one answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdkit.common import files, json_files
from hvdkit.common.units import printable
from hvdkit.errors import DataError, HvdkitError
from hvdkit.observe import step_files
from hvdkit.read.causes import Cause, by_cost
from hvdkit.read.explain import exchange, step_causes
from hvdkit.read.explain.results import Explanation, JobLaunch, Read
from hvdkit.read.explain.sources import LAUNCH, MPI, STALL, STEPS, TIMELINE, TRACE, find
from hvdkit.read.explain.step_causes import StepCauses

LATE = frozenset(
    {"input", "compute", "host", "late", "random-late", "blocked", "affinity", "pause", "gc", "growth", "first-steps"}
)
"""Causes by which a rank comes late; the times of the steps tell them apart, a timeline often cannot."""
_LONGEST = 300
"""Characters of a stall report that are shown."""


def explain(paths: Sequence[Path]) -> Explanation:
    """What costs a job time.

    Args:
        paths: recordings, and directories with them.
    Raises:
        DataError: there are none, or none can be read.
        InvalidArgumentError: there are those of several jobs.
    """
    joined = _Joined(find(paths))
    joined.add_tool(LAUNCH, joined.of_launch)
    joined.add_tool(STEPS, joined.of_steps)
    joined.add_tool(TIMELINE, joined.of_timeline)
    joined.add_tool(TRACE, _of_traces)
    joined.add_tool(MPI, _of_mpi)
    joined.add_rest()
    return joined.answer()


class _Joined:
    """What the recordings say, as they are read: those that see more of a cause come first."""

    def __init__(self, sources: Mapping[str, list[Path]]) -> None:
        self._sources = sources
        self._launched: JobLaunch | None = None
        self._steps: StepCauses | None = None
        self._causes: list[Cause] = []
        self._untold: list[str] = []
        self._read: list[Read] = []
        self._errors: list[str] = []
        self._settled: frozenset[str] = frozenset()
        self._stalled: str | None = None

    def of_launch(self, paths: list[Path]) -> tuple[list[Cause], str]:
        """How the job was started."""
        self._launched = found = json_files.read(paths[0], JobLaunch)
        threads = {None: "", 1: ", 1 thread each"}.get(found.threads, f", {found.threads} threads each")
        return [], f"{found.ranks} ranks by {found.launcher}{threads}"

    def of_steps(self, paths: list[Path]) -> tuple[list[Cause], str]:
        """The times of the steps, whose causes stand as they are: no other recording was looked at before."""
        directory = paths[0].parent
        self._steps = told = step_causes.look(step_files.read(directory), directory, self._launched)
        self._settled = LATE if told.ready else frozenset()
        self._causes += told.causes
        self._untold += told.untold
        return [], f"{told.steps} steps of {told.ranks} ranks"

    def of_timeline(self, paths: list[Path]) -> tuple[list[Cause], str]:
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
        if self._steps is not None and self._steps.waits is not None and summary.start_time_since_epoch is not None:
            exact = exchange.causes(columns, summary.start_time_since_epoch, self._steps.waits, paths[0])
        if exact is not None:
            self._settled |= exchange.KINDS
            self._causes += exact
            self._split_exchange(sum(cause.lost_s for cause in exact))
        return list(summary.causes), f"{summary.operations} operations"

    def _split_exchange(self, explained_s: float) -> None:
        """What a timeline explains of the exchange is no longer said of the whole of it."""
        for at, cause in enumerate(self._causes):
            if cause.kind == "exchange" and cause.per_step:
                left = max(0.0, cause.lost_s - explained_s)
                rest = replace(cause, lost_s=left, share=cause.share * left / cause.lost_s)
                self._causes[at : at + 1] = [rest] if left > 0.5 * cause.lost_s else []
                return

    def add_tool(self, what: str, look: Callable[[list[Path]], tuple[list[Cause], str]]) -> None:
        """What another tool finds in its own recording."""
        paths = self._sources.get(what, [])
        if not paths:
            return
        place = str(paths[0] if len(paths) == 1 and what != STEPS else paths[0].parent)
        try:
            causes, says = look(paths)
        except HvdkitError as error:
            self._errors.append(str(error))
            return
        self._read.append(Read(place, what, says))
        for cause in causes:
            self._add(cause, Path(place).name)

    def _add(self, cause: Cause, place: str) -> None:
        """A cause that is not there yet; one that is there gets a further witness."""
        if place not in cause.evidence:
            cause = replace(cause, evidence=f"{place}: {cause.evidence}")
        timed = self._steps is not None and self._steps.ready
        for at, other in enumerate(self._causes):
            others = bool(cause.ranks and other.ranks) and {*cause.ranks}.isdisjoint(other.ranks)
            late = cause.kind in LATE and other.kind in LATE and (timed or _same_delay(cause, other))
            if not others and (late or cause.kind == other.kind):
                if other.kind == "late" != cause.kind and other.ranks == cause.ranks:  # and now it is known why
                    other = replace(other, kind=cause.kind, what=cause.what, advice=cause.advice)
                if place not in other.evidence:
                    other = replace(other, evidence=f"{other.evidence.rstrip('.')}. So says {place}.")
                self._causes[at] = other
                return
        if cause.kind not in self._settled:
            self._causes.append(cause)

    def add_rest(self) -> None:
        """Stall reports, and where to look further."""
        if stacks := self._sources.get(STALL):
            said = [_first_line(path) for path in stacks]
            missing = dict.fromkeys(line for line in said if "did not arrive" in line) or said[:1]
            self._stalled = f"The job stalled: {'; '.join(missing)[:_LONGEST]}. The stacks are in {stacks[0].parent}."
            self._read.append(Read(str(stacks[0].parent), STALL, f"{len(stacks)} ranks"))

    def answer(self) -> Explanation:
        """All of it, the most costly cause first.

        Raises:
            DataError: nothing could be read.
        """
        told = self._steps
        if self._errors and not any(one.what not in (LAUNCH, STALL) for one in self._read):
            raise DataError(self._errors[0])
        causes = by_cost(self._causes)
        causes.sort(key=lambda cause: not cause.recurs)
        if told is None:
            self._untold.append(
                "Without the times of the steps nothing is known of each rank's input and computation: start the job "
                "with 'hvdkit launch --explain-job'."
            )
        return Explanation(
            ranks=told.ranks if told else self._launched.ranks if self._launched else None,
            steps=told.steps if told else None,
            step_s=told.step_s if told else None,
            accounts=told.accounts if told else {},
            causes=tuple(causes),
            untold=tuple([*self._untold, *self._errors]),
            read=tuple(self._read),
            stalled=self._stalled,
        )


def _first_line(path: Path) -> str:
    try:
        return printable(files.text(path, errors="replace").partition("\n")[0])
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def _same_delay(cause: Cause, known: Cause) -> bool:
    """Whether a later witness means the rank that is known to be late, also where it cannot say which one that is."""
    unnamed = cause.kind == "late" and not cause.ranks
    return not {*known.ranks}.isdisjoint(cause.ranks) or (unnamed and 2 * known.share >= cause.share)


def _of_traces(paths: list[Path]) -> tuple[list[Cause], str]:
    from hvdkit.read.trace.summary import summarize

    summary = summarize([str(path) for path in paths])
    return list(summary.causes), f"{len(summary.ranks)} ranks"


def _of_mpi(paths: list[Path]) -> tuple[list[Cause], str]:
    from hvdkit.read.mpi_profile import reading
    from hvdkit.read.mpi_profile.causes import causes

    profile = reading.read(paths)
    return causes(profile, profile.ranks[0]), f"{len(profile.ranks)} ranks"
