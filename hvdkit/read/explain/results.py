"""How the job was started, and what is answered."""

from __future__ import annotations

from hvdkit.common.json_files import Document, Part, Positive
from hvdkit.read.causes import Cause

LAUNCHED = "launch.json"
"""The file in the directory of a job that says how it was started."""


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
