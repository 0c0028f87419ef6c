"""What a monitor has written so far: ``metrics.jsonl``, read on from where it was read last."""

from __future__ import annotations

import itertools
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hvdkit.common import files
from hvdkit.common.units import printable
from hvdkit.errors import DataError, DataNotFoundError
from hvdkit.observe.history import NAME, SCHEMA

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


class RankColumns(msgspec.Struct, frozen=True):
    """Seconds per step, and bytes, of each rank; of many ranks, of those in ``rank``."""

    step: Known
    input: Known
    compute: Known
    wait: Known
    rss: Bytes
    device: Bytes
    rank: list[Rank] | None = None

    def __post_init__(self) -> None:
        columns = (self.step, self.input, self.compute, self.wait, self.rss, self.device, self.rank or self.step)
        if len(set(map(len, columns))) > 1 or not self.step:
            raise ValueError("its ranks have lists of different lengths, or none")


class HistoryWindow(msgspec.Struct, frozen=True):
    """Some steps, of which ``step`` is the last one."""

    time: Time
    step: Step
    ranks: RankColumns | None
    logs: dict[str, Number | None]
    epoch: Step | None = None
    samples_per_s: Number | None = None
    grad_norm: Number | None = None


class HistoryReport(msgspec.Struct, frozen=True):
    """What was wrong in a lasting way, seen in the window whose last step is ``step``."""

    time: Time
    step: Step
    text: str


class Mark(msgspec.Struct, frozen=True):
    """A checkpoint was written, or the job has ended."""

    time: Time
    step: Step


@dataclass(frozen=True, slots=True)
class RankNow:
    """One rank in the last window: seconds of a step, of which ``own`` is not the wait for other ranks, and bytes."""

    rank: int
    own: float | None
    step: float | None
    input: float | None
    compute: float | None
    wait: float | None
    rss: float | None
    device: float | None


class _Kind(msgspec.Struct, frozen=True):
    kind: str


_KINDS: dict[str, type] = {
    "start": Start, "window": HistoryWindow, "report": HistoryReport, "checkpoint": Mark, "end": Mark,
}  # fmt: skip


class Run:
    """What is known of a training, which several jobs may have taken part in.

    Args:
        path: the directory that was given to the monitor, or the file in it.
    Attributes:
        start: of the newest job.
        jobs: how many there were.
        windows: in order, without those that a later job has taken again, and without their ranks.
        ranks: of the last window.
        reports: all of them.
        ended: the newest job has said that it is over.
        updated: time of the last line.
    """

    start: Start

    def __init__(self, path: Path) -> None:
        self.path = path / NAME if files.is_directory(path) else path
        self._inode = 0
        self._begin()

    def _begin(self) -> None:
        self._offset = self._line = self.jobs = 0
        self.windows: list[HistoryWindow] = []
        self.ranks: RankColumns | None = None
        self.reports: list[HistoryReport] = []
        self._checkpoints: list[Mark] = []
        self.ended, self.updated = False, 0.0

    def read(self) -> None:
        """Take in what the file says now; a last line that is not complete yet is left for later.

        Raises:
            DataNotFoundError: there is no file.
            DataError: it cannot be read, or is something else.
        """
        try:
            with files.opened(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode = status.st_ino
                    self._begin()
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._take(line)
                    self._offset += len(line)
        except FileNotFoundError as error:
            raise DataNotFoundError(
                f"No history at {str(self.path)!r}; give the directory of hk.Monitor, or start the job with "
                "'hvdkit launch --monitor DIR'."
            ) from error
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read ({error.strerror}); give the directory of a monitor."
            ) from error
        if not self.jobs:
            raise self._wrong("it has no complete line yet")

    @property
    def checkpoint(self) -> Mark | None:
        """The newest one."""
        return self._checkpoints[-1] if self._checkpoints else None

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.windows[-1].step if self.windows else self.start.step

    def _recent(self) -> list[HistoryWindow]:
        """The last windows of the newest job."""
        return [one for one in self.windows[-_RECENT - 1 :] if one.time >= self.start.time]

    def pace(self) -> float | None:
        """Seconds per step of late, with what lies between steps, such as checkpoints."""
        recent = self._recent()
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
        gaps = [later.time - earlier.time for earlier, later in itertools.pairwise(self._recent())]
        usual = statistics.median(gaps) if gaps else 60.0
        return "silent" if now - self.updated > max(60.0, 5 * usual) else "running"

    def slowest(self) -> list[RankNow]:
        """The ranks that the last window tells of, the slowest first."""
        ranks, rows = self.ranks, []
        if ranks is None:
            return []
        values = zip(ranks.step, ranks.input, ranks.compute, ranks.wait, ranks.rss, ranks.device, strict=True)
        for rank, (step, input_, compute, wait, *memory) in zip(ranks.rank or itertools.count(), values, strict=False):
            if compute is not None:
                own = (input_ or 0.0) + compute
            else:
                own = step if step is None or wait is None else max(0.0, step - wait)
            rows.append(RankNow(rank, own, step, input_, compute, wait, *memory))
        return sorted(rows, key=lambda rank: (-(rank.own or 0.0), rank.rank))

    def _take(self, text: bytes) -> None:
        """Take in one line; nothing where a later version wrote it."""
        self._line += 1
        try:
            kind = msgspec.json.decode(text, type=_Kind).kind
            if kind not in _KINDS:
                return
            line: Any = msgspec.json.decode(text, type=_KINDS[kind])
        except RecursionError as error:
            raise self._wrong(f"line {self._line} is nested too deeply") from error
        except ValueError as error:  # of msgspec, too
            raise self._wrong(f"line {self._line}: {printable(str(error))}") from error
        if not self.jobs and kind != "start":
            raise self._wrong(f"it begins with {kind}, expected start")
        self.updated = max(self.updated, line.time)
        if isinstance(line, Start):
            if not 1 <= line.schema <= SCHEMA:
                raise self._wrong(f"line {self._line} has schema {line.schema}, and this version knows 1 to {SCHEMA}")
            self.start, self.ended = line, False
            self.jobs += 1
            self.windows = [one for one in self.windows if one.step <= line.step]
            self._checkpoints = [one for one in self._checkpoints if one.step <= line.step]
        elif isinstance(line, HistoryWindow):
            self.ranks = line.ranks
            self.windows.append(msgspec.structs.replace(line, ranks=None))
        elif isinstance(line, HistoryReport):
            self.reports.append(line)
        elif kind == "checkpoint":
            self._checkpoints.append(line)
        else:
            self.ended = True

    def _wrong(self, problem: str) -> DataError:
        return DataError(f"{self.path} is not the history of a monitor: {problem}; give the directory of one.")
