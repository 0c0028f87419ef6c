"""What a monitor has written so far: ``metrics.jsonl``, read on from where it was read last."""

from __future__ import annotations

import itertools
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hvdkit.common import files
from hvdkit.common.units import printable
from hvdkit.errors import DataError, DataNotFoundError
from hvdkit.observe.history import NAME, SCHEMA

_LONGEST = 1 << 24
"""Bytes of a line; that of 10,000 ranks has a few thousand."""
_RECENT = 20
"""Windows from which the pace is taken."""
Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Known = list[Time | None]
Bytes = list[Annotated[float, msgspec.Meta(ge=0, le=1e18)] | None]


class Start(msgspec.Struct, frozen=True):
    """A job has begun to train, after ``step`` steps of jobs before it."""

    time: Time
    schema: int
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    step: Step
    steps: Step | None = None
    epochs: Step | None = None
    hvdkit: str = ""


class RankColumns(msgspec.Struct, frozen=True):
    """Seconds per step, and bytes, of each rank; of many ranks, of those in ``rank``."""

    step: Known
    input: Known
    compute: Known
    wait: Known
    rss: Bytes
    device: Bytes
    rank: list[Rank] | None = None


class HistoryWindow(msgspec.Struct, frozen=True):
    """Some steps, of which ``step`` is the last one."""

    time: Time
    step: Step
    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    ranks: RankColumns | None
    logs: dict[str, Number | None]
    epoch: Step | None = None
    samples_per_s: Number | None = None
    grad_norm: Number | None = None


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """A report of the monitor: what was wrong in a lasting way.

    Attributes:
        time: when, in seconds since 1970.
        step: in which window's last step.
        about, cause: what it is about, and why, one word each.
        text: one sentence.
        rank: whose; None where it is several ranks'.
        since: step after which it began.
        cost: seconds per step that it costs the job.
    """

    time: Time
    step: Step
    about: str
    cause: str
    text: str
    rank: Rank | None = None
    since: Step | None = None
    cost: Number | None = None


class Mark(msgspec.Struct, frozen=True):
    """A checkpoint was written, or the job has ended."""

    time: Time
    step: Step


class _Kind(msgspec.Struct, frozen=True):
    kind: str


_KINDS: dict[str, type] = {
    "start": Start,
    "window": HistoryWindow,
    "report": HistoryReport,
    "checkpoint": Mark,
    "end": Mark,
}


@dataclass(slots=True)
class Run:
    """What is known of a training, which several jobs may have taken part in.

    Attributes:
        start: of the newest job.
        jobs: how many there were.
        windows: in order, without those that a later job has taken again, and without their ranks.
        ranks: of the last window.
        reports: all of them.
        checkpoint: the newest one.
        ended: the newest job has said that it is over.
        updated: time of the last line.
    """

    start: Start
    jobs: int = 0
    windows: list[HistoryWindow] = field(default_factory=list)
    ranks: RankColumns | None = None
    reports: list[HistoryReport] = field(default_factory=list)
    checkpoint: Mark | None = None
    ended: bool = False
    updated: float = 0.0

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.windows[-1].step if self.windows else self.start.step

    def own_windows(self) -> list[HistoryWindow]:
        """The last windows of the newest job."""
        return [one for one in self.windows[-_RECENT - 1 :] if one.time >= self.start.time]

    def pace(self) -> float | None:
        """Seconds per step of late, with what lies between steps, such as checkpoints."""
        recent = self.own_windows()
        before = (self.start.time, self.start.step) if len(recent) < 2 else (recent[0].time, recent[0].step)
        steps = self.step - before[1]
        return max(0.0, recent[-1].time - before[0]) / steps if recent and steps > 0 else None

    def left(self) -> float | None:
        """Seconds that the training will take yet."""
        pace, steps = self.pace(), self.start.steps
        return None if pace is None or steps is None or self.ended else max(0, steps - self.step) * pace

    def state(self, now: float) -> str:
        """ "running", "ended", or "silent" where nothing has come for much longer than a window takes."""
        if self.ended:
            return "ended"
        times = [one.time for one in self.own_windows()]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        usual = statistics.median(gaps) if gaps else 60.0
        return "silent" if now - self.updated > max(60.0, 5 * usual) else "running"

    def take(self, kind: str, line: Any) -> None:
        """Add one line."""
        self.updated = max(self.updated, line.time)
        if kind == "start":
            self.start, self.ended = line, False
            self.jobs += 1
            self.windows = [one for one in self.windows if one.step <= line.step]
            if self.checkpoint is not None and self.checkpoint.step > line.step:
                self.checkpoint = None
        elif kind == "window":
            self.ranks = line.ranks
            self.windows.append(msgspec.structs.replace(line, ranks=None))
        elif kind == "report":
            self.reports.append(line)
        elif kind == "checkpoint":
            self.checkpoint = line
        else:
            self.ended = True


class Reader:
    """Follows a history.

    Args:
        path: the directory that was given to the monitor, or the file in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path / NAME if files.is_directory(path) else path
        self._inode = self._offset = self._line = 0
        self._run: Run | None = None

    def read(self) -> Run:
        """What the file says now; a last line that is not complete yet is left for later.

        Raises:
            DataNotFoundError: there is no file.
            DataError: it cannot be read, or is something else.
        """
        try:
            with files.opened(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._line, self._run = status.st_ino, 0, 0, None
                file.seek(self._offset)
                while end := (block := file.read(_LONGEST)).rfind(b"\n") + 1:
                    for line in block[:end].splitlines():
                        self._take(line)
                    self._offset += end
                    file.seek(self._offset)
                if len(block) == _LONGEST:
                    raise self._wrong(f"line {self._line + 1} is longer than {_LONGEST >> 20} MiB")
        except FileNotFoundError as error:
            raise DataNotFoundError(
                f"No history at {str(self.path)!r}; give the directory of hk.Monitor, or start the job with "
                "'hvdkit launch --monitor DIR'."
            ) from error
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read ({error.strerror}); give the directory of a monitor."
            ) from error
        if self._run is None:
            raise self._wrong("it has no complete line yet")
        return self._run

    def _take(self, text: bytes) -> None:
        """Take in one line of the history; DataError where it is damaged, nothing where a later version wrote it."""
        self._line += 1
        try:
            kind = msgspec.json.decode(text, type=_Kind).kind
            if kind not in _KINDS:
                return  # of a later version
            line: Any = msgspec.json.decode(text, type=_KINDS[kind])
            if isinstance(line, HistoryWindow):
                _check(line.ranks)
        except RecursionError as error:
            raise self._wrong(f"line {self._line} is nested too deeply") from error
        except ValueError as error:  # of msgspec, too
            raise self._wrong(f"line {self._line}: {printable(str(error))}") from error
        if isinstance(line, Start) and line.schema != SCHEMA:
            raise self._wrong(f"line {self._line} has schema {line.schema}, and this version knows {SCHEMA} alone")
        if self._run is None:
            if not isinstance(line, Start):
                raise self._wrong(f"it begins with {printable(kind)}, expected start")
            self._run = Run(line)
        self._run.take(kind, line)

    def _wrong(self, problem: str) -> DataError:
        return DataError(f"{self.path} is not the history of a monitor: {problem}; give the directory of one.")


def _check(ranks: RankColumns | None) -> None:
    if ranks is None:
        raise ValueError("it has no ranks")
    values = (ranks.step, ranks.input, ranks.compute, ranks.wait, ranks.rss, ranks.device)
    if len({len(one) for one in (*values, ranks.rank or ranks.step)}) > 1 or not ranks.step:
        raise ValueError("its ranks have lists of different lengths, or none")
