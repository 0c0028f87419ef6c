"""What ``hvdkit explain`` answers."""

from __future__ import annotations

from hvdkit.common.causes import Cause
from hvdkit.common.json_files import Document, Part


class Read(Part, frozen=True):
    """A recording that was read.

    Attributes:
        path: the file, or the directory of the files of all ranks.
        what: "step times", "timeline", "trace", "mpi profile", "bench results", "launch" or "stall report".
        says: what was in it, a few words.
    """

    path: str
    what: str
    says: str


class Explanation(Document, frozen=True):
    """What costs a job time, the dearest cause first; none where nothing is wrong as far as can be told.

    Attributes:
        ranks: of the job; None where no recording says it.
        steps: that count in the times of the steps; None without these.
        step_s: seconds of one, the mean; None without these.
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
    causes: tuple[Cause, ...]
    untold: tuple[str, ...]
    read: tuple[Read, ...]
    stalled: str | None
