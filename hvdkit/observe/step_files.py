"""When the steps of a training begin and end: written by every rank, read by ``hvdkit bench`` and ``explain``.

A rank's file is ``rank-R.jsonl`` in the directory that HVDKIT_STEP_TIMES names.
"""

from __future__ import annotations

import gc
import json
import math
import os
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hvdkit.core import listeners
from hvdkit.errors import DataError
from hvdkit.steps import launchers

MARK, VERSION = "step times", 1
"""Of the first line of a file."""
_SETTLED = 5
"""First steps that say nothing of the cores: what is built in them does not recur."""
_KEPT, _KEPT_S = 512, (2.0, 60.0)
"""Steps, and the least and most seconds, that are kept in memory, so that a job that is killed leaves most of them."""
_UNKNOWN = (math.nan, math.nan, math.nan)
_LEAST_EVENT_S, _MOST_EVENTS, _APART_S = 5e-4, 4096, 1e-3
"""Events that are shorter are left out, and so are those beyond so many between two writes; what is nearer is one."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank; seconds since the epoch of Unix, on a clock that never goes back within a process.

    Attributes:
        asked: the batch was asked for; the step before had ended.
        given: the batch was there.
        ready: the gradients were there, and the rank began to wait for the others; None where nobody said so.
        ended: the step was complete.
        arrived: the gradients of all ranks were there: the one moment that all ranks share; None where nobody said so.
        used: seconds from ``asked`` to ``ready`` (to ``ended`` without it) in which the thread that trains ran, in
            which others had its core, and which all threads of the process ran; None where the kernel does not say it.
    """

    asked: float
    given: float
    ready: float | None
    ended: float
    arrived: float | None = None
    used: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Something of this process that took time within the steps, from ``at`` on the clock of the steps.

    Attributes:
        name: "gc" (garbage collection), "fsync" (the disk has it), "saving" (a checkpoint), "evaluation", or
            "shard_state" (weights that other ranks have updated).
    """

    name: str
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank wrote.

    Attributes:
        steps, events: in order.
        host: a number that ranks of one host share; None in older files.
        cores: as ``Step.used``, the mean of all steps; None where the kernel does not say it.
        cpus: cores to which the thread that trains is bound; None in older files.
    """

    rank: int
    steps: tuple[Step, ...]
    host: int | None = None
    cores: tuple[float, ...] | None = None
    cpus: frozenset[int] | None = None
    events: tuple[StepEvent, ...] = ()


class Recorder:
    """Writes the steps of one process to ``rank-R.jsonl`` in a directory; a failure to write never ends a training.

    Args:
        directory: where to write.
        rank: of this process.
    Attributes:
        on_step: called with the number of steps that have ended, after each.
        marked: whether ``step_marks`` tells it what a script does.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int) -> None:
        self._path, self._rank = Path(directory) / f"rank-{rank}.jsonl", rank
        self._offset = time.time() - time.perf_counter()
        self._open = self._by_hand = self._begun = self.marked = False
        self._asked = self._given = self._loading = self._input = 0.0
        self._ready: float | None = None
        self._arrived: float | None = None
        self._processor: Processor | None = None
        self._before = self._used = _UNKNOWN
        self._events: list[tuple[str, float, float, float]] = []
        self._steps: list[tuple[float | None, ...]] = []
        self._ended = 0
        self._cores: tuple[float, float, float] | None = None
        self._started = time.perf_counter()
        self._due = self._started + _KEPT_S[0]
        self._evaluating: dict[int, float] = {}
        self.on_step: Callable[[int], None] | None = None

    def asked(self, *, by_hand: bool = True) -> None:
        """The next batch is asked for; a step that is open ends here.

        ``by_hand``: the script says so; from then on what is only seen of it (``step_marks``) does not count.
        """
        if self._ignored(by_hand):
            return
        now = time.perf_counter()
        self._end(now)
        self._asked = now
        self._before = self._spent()

    def given(self, batch: Any = None, *, by_hand: bool = True) -> None:  # noqa: ARG002
        """The batch is there: the step begins to work."""
        if self._ignored(by_hand):
            return
        self._given = time.perf_counter()
        self._ready = self._arrived = None
        self._open = True

    def ready(self) -> None:
        """This rank's part of the step is computed; the first call in a step counts."""
        if self._open and self._ready is None:
            self._ready = time.perf_counter()
            self._used = self._spent()

    def arrived(self) -> None:
        """The gradients of all ranks are there; the last call in a step counts."""
        if self._open and self._ready is not None:
            self._arrived = time.perf_counter()

    def event(self, name: str, at: float, seconds: float) -> None:
        """Something took time: ``name`` and when it began, by ``time.perf_counter``; what lies within it is a part."""
        while self._events and self._events[-1][1] >= at:
            self._events.pop()
        last = self._events[-1] if self._events else ("", 0.0, 0.0, 0.0)
        if last[0] == name and at - last[3] < _APART_S:
            more = max(0.0, at + seconds - max(at, last[3]))
            self._events[-1] = name, last[1], last[2] + more, last[3] + more if at < last[3] else at + seconds
            return
        if last[0] and last[2] < _LEAST_EVENT_S:  # it was not merged into a longer one: room for what is worth it
            self._events.pop()
        if len(self._events) < _MOST_EVENTS:
            self._events.append((name, at, seconds, at + seconds))

    def evaluating(self, model: object, *, begins: bool) -> None:
        """A model is made ready to evaluate, or to train again; where a step ends before that, it was no evaluation."""
        now = time.perf_counter()
        if begins:
            self._evaluating.setdefault(id(model), now)
        elif id(model) in self._evaluating:
            begun = self._evaluating.pop(id(model))
            self.event("evaluation", begun, now - begun)

    def finished(self) -> None:
        """No further batch for now (the end of an epoch): write what there is."""
        if self._by_hand:
            self._end(time.perf_counter())
        self._open = False
        if self._steps:
            self._write()

    def taken(self) -> None:
        """The batch is taken from the data set within the step; until here it was waited for."""
        if self._open:
            self._given = time.perf_counter()

    def loading(self) -> None:
        """A loader is asked for a batch, one of as many as a step may take."""
        self._loading = time.perf_counter()
        if not self._open and not self._by_hand:
            self._open, self._asked, self._input = True, self._loading, 0.0
            self._ready, self._before = None, self._spent()

    def loaded(self, more: bool) -> None:
        """It gave one, or has no more: then what follows belongs to no step."""
        if self._by_hand:
            return
        self._input += time.perf_counter() - self._loading
        self._ready = self._arrived = None
        self._open = more

    def stepped(self) -> None:
        """An optimizer has changed the weights: a step ends, and the next one begins."""
        if self._by_hand:
            return
        now = time.perf_counter()
        self._given = self._asked + self._input
        self._end(now)
        self._open, self._asked, self._input, self._ready, self._arrived = True, now, 0.0, None, None
        self._before = self._spent()

    def _ignored(self, by_hand: bool) -> bool:
        if by_hand and not self._by_hand:
            self._by_hand, self._open = True, False
        return self._by_hand and not by_hand

    def _end(self, now: float) -> None:
        if self._open:
            self._evaluating.clear()
            used = self._spent() if self._ready is None else self._used
            spent = [max(0.0, end - begin) for begin, end in zip(self._before, used, strict=True)]
            moments = [self._asked, self._given, self._ready, now, self._arrived]
            self._steps.append((*[None if at is None else self._offset + at for at in moments], *spent))
            self._open = False
            self._ended += 1
            if self._ended == _SETTLED:
                self._cores = self._spent()
            if len(self._steps) >= _KEPT or now >= self._due:
                self._write()
                self._due = now + min(max(now - self._started, _KEPT_S[0]), _KEPT_S[1])  # as long again as it has run
            if self.on_step is not None:
                self.on_step(self._ended)

    def _spent(self) -> tuple[float, float, float]:
        """What the thread that trains has had of the processor so far: this thread, the first that says something."""
        if self._processor is None:
            self._processor = Processor()
        return self._processor.spent()

    def _write(self) -> None:
        """Append the collected steps, and the cores' times so far, to this rank's file; a warning where it cannot."""
        head = {
            "hvdkit": MARK,
            "version": VERSION,
            "rank": self._rank,
            "host": zlib.crc32(os.uname().nodename.encode()),  # no name: such files are shown to others
            "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        }
        lines = [] if self._begun else [json.dumps(head)]
        for times in self._steps:
            known = [None if value is None or math.isnan(value) else round(value, 7) for value in times]
            lines.append(json.dumps(known))
        for name, at, seconds, _ in self._events:
            if seconds < _LEAST_EVENT_S:
                continue
            lines.append(json.dumps({"event": name, "at": round(self._offset + at, 7), "seconds": round(seconds, 7)}))
        self._steps, self._events = [], []
        before, now = self._cores, self._spent()
        if before is not None and not math.isnan(before[0] + now[0]) and self._ended > _SETTLED:
            ran, queued, of_all = (max(0.0, end - begin) for begin, end in zip(before, now, strict=True))
            lines.append(json.dumps({"steps": self._ended - _SETTLED, "ran": ran, "queued": queued, "of_all": of_all}))
        again = os.environ.get("HVDKIT_RESTART", "0") != "0"
        mode = "a" if self._begun else "w" if again else "x"  # the file is of one process: a rank may start others
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
            self._begun = True
        except OSError as error:
            warnings.warn(f"the times of the steps are lost: {self._path}: {error.strerror}", stacklevel=3)


class RecordedSteps(Generic[_T]):
    """An iterable whose every turn of the loop is recorded as a step; has a length where the batches have one."""

    def __init__(self, batches: Iterable[_T], recorder: Any) -> None:
        self._batches = batches
        self._recorder = recorder

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        if not isinstance(self._batches, Sized):
            raise TypeError(f"{type(self._batches).__name__} has no length")
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the batches."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[_T]:
        """One epoch."""
        recorder = self._recorder
        try:
            recorder.asked()
            for batch in self._batches:
                recorder.given(batch)
                yield batch
                recorder.asked()
        finally:
            recorder.finished()


def recorder() -> Recorder | None:
    """The recorder of this process; None when the environment does not ask for one.

    Raises:
        LauncherError: the launcher's environment is incomplete.
    """
    directory = os.environ.get(listeners.STEP_TIMES)
    if not directory:
        return None
    if not listeners.RECORDERS:
        launched = launchers.detect(os.environ)
        made = Recorder(directory, 0 if launched is None else launched.rank)
        begun = 0.0

        def collection(phase: str, _: Mapping[str, int]) -> None:
            nonlocal begun
            now = time.perf_counter()
            if phase == "stop":
                made.event("gc", begun, now - begun)
            begun = now

        gc.callbacks.append(collection)
        listeners.RECORDERS.append(made)
    found: Recorder = listeners.RECORDERS[0]
    return found


def record_steps(batches: Iterable[_T]) -> Iterable[_T]:
    """Have ``hvdkit bench`` see when every step begins and ends: ``for x, y in record_steps(loader)``.

    The time in the loader is recorded apart from that of the step. In the step it is recorded when the gradients were
    there and the wait for other ranks began: in PyTorch the end of the first backward, in ``hvdkit.arrays`` the last
    call or ``start`` of a ``Reduce``. Does nothing, and returns ``batches`` themselves, unless HVDKIT_STEP_TIMES names
    a directory to write to. On a GPU, times are those of the host.

    Args:
        batches: any iterable, such as the loader of ``shard``.
    """
    for one in listeners.MONITORS:
        if one.automatic:
            batches = RecordedSteps(batches, one)
    found = recorder()
    return batches if found is None else RecordedSteps(batches, found)


class Processor:
    """Seconds that a thread ran, that it waited for a core, and that all threads of the process ran.

    It is of the thread that makes it, whichever thread asks: TensorFlow says from others that it is ready. That one
    alone, since a thread that waits for messages may well run all the time, and lose nothing by waiting.

    Source: Linux, Documentation/scheduler/sched-stats.rst.
    """

    def __init__(self) -> None:
        self._clock: int | None = None
        try:
            self._queue = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._queue).atexit = False  # a monitor asks until the process ends
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self.spent()
        except (OSError, ValueError, AttributeError):  # no Linux, or one that does not say it
            self._clock = None

    def spent(self) -> tuple[float, float, float]:
        """So far; NaN where the kernel does not say it."""
        if self._clock is None:
            return _UNKNOWN
        try:
            queued = int(os.pread(self._queue, 100, 0).split()[1]) / 1e9
            return time.clock_gettime(self._clock), queued, time.process_time()
        except (OSError, LookupError):  # a thread that has ended
            return _UNKNOWN


def read(directory: Path) -> list[RankTimes]:
    """What the ranks wrote to a directory, by rank; empty when none wrote anything.

    Raises:
        DataError: a file that is not what a rank writes.
    """
    return sorted((_read(path) for path in directory.glob("rank-*.jsonl")), key=lambda times: times.rank)


def _read(path: Path) -> RankTimes:
    """The file of one rank, as ``Recorder`` writes it; DataError where it is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        if "\n" in text:  # a rank that is killed as it writes leaves part of a line
            text = text[: text.rindex("\n")]
        header, *lines = [json.loads(line) for line in text.splitlines()]
        if header["hvdkit"] != MARK or header["version"] != VERSION:
            raise ValueError(f"the first line is {header!r}")
        host, cpus = header.get("host"), header.get("cpus")
        steps: list[Step] = []
        events: list[StepEvent] = []
        cores: dict[str, Any] | None = None
        for line in lines:
            if not isinstance(line, dict):
                steps.append(_step(line))
            elif "event" in line:
                events.append(StepEvent(str(line["event"]), _seconds(line["at"]), _seconds(line["seconds"])))
            else:
                cores = line
        return RankTimes(
            int(header["rank"]),
            tuple(steps),
            None if host is None else int(host),
            None if cores is None else _cores(cores),
            None if cpus is None else frozenset(map(int, cpus)),
            tuple(events),
        )
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is not a file of step times (version {VERSION}) or not complete: {error}.") from error


def _step(line: list[Any]) -> Step:
    asked, given, ready, ended, *more = line
    if len(more) not in (0, 4):
        raise ValueError(f"a step has {len(line)} values")
    arrived, *used = more or (None,)
    ready, arrived = (None if at is None else _seconds(at) for at in (ready, arrived))
    ran = tuple(map(_seconds, used)) if used and None not in used else None
    return Step(_seconds(asked), _seconds(given), ready, _seconds(ended), arrived, ran)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a time is {value!r}")
    return float(value)


def _cores(line: dict[str, Any]) -> tuple[float, ...]:
    steps = line["steps"]
    if type(steps) is not int or steps < 1:
        raise ValueError(f"a number of steps is {steps!r}")
    return tuple(_seconds(line[name]) / steps for name in ("ran", "queued", "of_all"))
