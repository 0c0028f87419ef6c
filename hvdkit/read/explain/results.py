"""How the job was started, what is answered, and the answer in at most ten lines, the verdict first."""

from __future__ import annotations

from hvdkit.common.json_files import Document, Part, Positive
from hvdkit.common.units import count_text, duration_text, printable, share_text
from hvdkit.read.causes import Cause

LAUNCHED = "launch.json"
"""The file in the directory of a job that says how it was started."""
LINES = 10
_FURTHER = 3
"""Causes after the first one that are said."""
_UNTOLD = 3


class JobLaunch(Document, frozen=True):
    """How a job was started.

    Attributes:
        ranks: how many processes.
        launcher: such as "mpirun".
        cores: usable ones of the machine on which it was started.
        ranks_on_a_host: the most that share one; None where only the launcher knows.
        threads: OMP_NUM_THREADS of each rank; None where it is not set to a number.
        settings: the variables of Horovod (HOROVOD_*) that are set.
    """

    kind = "job-launch"
    written_by = "hvdkit launch --explain-job"

    ranks: Positive
    launcher: str
    cores: Positive
    ranks_on_a_host: Positive | None
    threads: Positive | None
    settings: dict[str, str]


class Read(Part, frozen=True):
    """A recording that was read.

    Attributes:
        path: the file, or the directory of the files of all ranks.
        what: "step times", "timeline", "trace", "mpi profile", "launch" or "stall report".
        says: what was in it, a few words.
    """

    path: str
    what: str
    says: str


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


def lines(found: Explanation) -> list[str]:
    """What is printed."""
    if not found.causes and found.stalled is None:
        first = ["Nothing that is worth changing was found." if found.steps else "No cause of lost time was found."]
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
    accounts = [_accounts_text(found)] if found.accounts else []
    room = LINES - len(first) - len(further) - len(more) - len(accounts) - 1
    said = [*first, *further, *more, *accounts, *untold[:room], f"Read: {read}{step}."]
    return [printable(line) for line in said]


def _accounts_text(found: Explanation) -> str:
    """Where the whole recorded time went, and how much of it the causes that are printed explain."""
    whole = sum(found.accounts.values()) or 1.0
    parts = sorted(found.accounts.items(), key=lambda part: -part[1])
    words = ", ".join(f"{name} {share_text(seconds / whole)}" for name, seconds in parts if seconds >= 0.01 * whole)
    shown = found.causes[: 1 + _FURTHER]
    explained = sum((found.steps or 0) * cause.lost_s if cause.per_step else cause.lost_s for cause in shown)
    named = f"the causes above explain {share_text(min(1.0, explained / whole))}" if found.causes else "no cause named"
    return f"Of {duration_text(1e6 * whole)}: {words}; {named}."
