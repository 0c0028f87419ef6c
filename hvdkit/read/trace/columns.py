"""The events of a trace that count, as arrays: a few dozen bytes each."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import CorruptDataError
from hvdkit.read.timeline.measures import Floats, Intervals, union
from hvdkit.read.trace.events import TraceEvent, TraceFile
from hvdkit.read.trace.kinds import SOURCES, SYNCHRONISES, Kind, Source, kind_of

MEMORY_EVENT = "[memory]"
_OF = re.compile(r"(?<![0-9])(\d{1,7})-of-(\d{1,7})(?![0-9])")
_RANK = re.compile(r"rank[-_.]?(\d{1,7})(?![0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class TraceColumns:
    """A trace; times in microseconds of its own clock.

    Attributes:
        path: the file.
        rank, size: of the process; None where neither the file nor its name says so.
        start, end: of the events, (n,), by process and thread, then in order of time, what holds others before them.
        name: index into ``names``.
        source, kind: ``kinds.Source`` and ``kinds.Kind``.
        thread: a number for each pair of process and thread.
        external: what joins a kernel to the operator that started it; -1 where nothing does.
        names: of the events.
        memory_time, memory_thread, memory_bytes, memory_total: of allocations (negative where memory is freed): when,
            where, how much, and how much was allocated on its device then (NaN where the file does not say).
        memory_device: "CPU" or "GPU 0", as index into ``devices``.
        devices: names of these.
        events: of the whole file.
        skipped: events that could not be used: no number for a time, a negative length.
        repeated: events that are in the file twice, which count once.
    """

    path: Path
    rank: int | None
    size: int | None
    start: Floats
    end: Floats
    name: NDArray[np.int64]
    source: NDArray[np.int64]
    kind: NDArray[np.int64]
    thread: NDArray[np.int64]
    external: NDArray[np.int64]
    names: list[str]
    memory_time: Floats
    memory_thread: NDArray[np.int64]
    memory_bytes: Floats
    memory_total: Floats
    memory_device: NDArray[np.int64]
    devices: list[str]
    events: int
    skipped: int
    repeated: int

    def covered(self, mask: NDArray[np.bool_]) -> Intervals:
        """What the events of the mask cover together."""
        return union(self.start[mask], self.end[mask])

    @property
    def on_gpu(self) -> NDArray[np.bool_]:
        """Which events are kernels and copies."""
        return np.isin(self.source, (Source.KERNEL, Source.COPY))


def collect(path: str | Path) -> TraceColumns:
    """Read a trace.

    Args:
        path: of a file, plain or compressed with gzip.
    Raises:
        DataNotFoundError, DataError, CorruptDataError: as ``TraceFile``; and where the trace holds no operator, no
            kernel and no range.
    """
    file = TraceFile(Path(path))
    collector = _Collector()
    for events in file:
        for event in events:
            collector.add(event)
    if not len(collector.rows[0]):
        raise CorruptDataError(
            f"no operator and no kernel in {str(path)!r} ({file.events} events); expected a trace that torch.profiler "
            "recorded with ProfilerActivity.CPU or CUDA."
        )
    return collector.columns(file)


def rank_of(file: TraceFile) -> tuple[int | None, int | None]:
    """Rank and size: of ``distributedInfo``, or else of a name such as trace-0-of-2.json.gz or rank3.json."""
    stated = _whole(getattr(file.distributed, "rank", None)), _whole(getattr(file.distributed, "world_size", None))
    if found := _OF.search(file.path.name):
        named: tuple[int | None, int | None] = int(found[1]), int(found[2])
    elif found := _RANK.search(file.path.name):
        named = int(found[1]), None
    else:
        named = None, None
    # A process group of one process says nothing about a job whose ranks another library connects.
    return named if stated[0] is None or (stated[1] == 1 and named[0] is not None) else stated


class _Collector:
    def __init__(self) -> None:
        self.names: dict[tuple[Source, str], int] = {}
        self.threads: dict[tuple[str, str], int] = {}
        self.devices: dict[str, int] = {}
        self.times = array("d"), array("d")
        self.rows = tuple(array("q") for _ in range(3))  # name, thread, external
        self.memory_times = tuple(array("d") for _ in range(3))  # time, bytes, total
        self.memory_rows = array("q"), array("q")  # thread, device
        self.skipped = 0

    def add(self, event: TraceEvent) -> None:
        if event.name == MEMORY_EVENT:
            self._add_memory(event)
            return
        source = SOURCES.get(event.cat.lower())
        if source is None or event.ph != "X":
            return
        if source == Source.RUNTIME and not SYNCHRONISES.match(event.name):
            return
        start, duration = _number(event.ts), _number(event.dur)
        if start is None or duration is None or duration < 0:
            self.skipped += 1
            return
        self.times[0].append(start)
        self.times[1].append(start + duration)
        external = None
        if event.args is not None:
            external = event.args.external if event.args.external is not None else event.args.external_before
        number = _whole(external)
        self.rows[0].append(self.names.setdefault((source, event.name), len(self.names)))
        self.rows[1].append(self._thread(event))
        self.rows[2].append(-1 if number is None else number)

    def _add_memory(self, event: TraceEvent) -> None:
        time, arguments = _number(event.ts), event.args
        size = None if arguments is None else _number(arguments.bytes)
        if time is None or arguments is None or size is None:
            self.skipped += 1
            return
        total = _number(arguments.allocated)
        device = "CPU" if arguments.device_type in (0, None) else f"GPU {arguments.device}"
        for column, value in zip(self.memory_times, (time, size, math.nan if total is None else total), strict=True):
            column.append(value)
        self.memory_rows[0].append(self._thread(event))
        self.memory_rows[1].append(self.devices.setdefault(device, len(self.devices)))

    def _thread(self, event: TraceEvent) -> int:
        return self.threads.setdefault((str(event.pid), str(event.tid)), len(self.threads))

    def columns(self, file: TraceFile) -> TraceColumns:
        start, end = (np.frombuffer(column, np.float64) for column in self.times)
        name, thread, external = (np.frombuffer(column, np.int64) for column in self.rows)
        sources = np.array([source for source, _ in self.names], np.int64)
        kinds = np.array([kind_of(source, text) for source, text in self.names], np.int64)
        repeated = _repeated(name, thread, start, end, np.where(kinds[name] == Kind.STEP, 1, external))
        order = np.lexsort((-end, start, thread))
        keep = order[~repeated[order]]
        time, size, total = (np.array(column, np.float64) for column in self.memory_times)
        rank, world = rank_of(file)
        return TraceColumns(
            path=file.path,
            rank=rank,
            size=world,
            start=start[keep],
            end=end[keep],
            name=name[keep],
            source=sources[name[keep]],
            kind=kinds[name[keep]],
            thread=thread[keep],
            external=external[keep],
            names=[text for _, text in self.names],
            memory_time=time,
            memory_thread=np.array(self.memory_rows[0], np.int64),
            memory_bytes=size,
            memory_total=total,
            memory_device=np.array(self.memory_rows[1], np.int64),
            devices=list(self.devices),
            events=file.events,
            skipped=self.skipped + file.skipped,
            repeated=int(repeated.sum()),
        )


def _repeated(
    name: NDArray[np.int64], thread: NDArray[np.int64], start: Floats, end: Floats, identity: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which events are in the file before, the same in all. Without an identity (> 0) it may be a second short call."""
    columns = (identity, name, end, start, thread)
    order = np.lexsort(columns)
    again = np.zeros(len(order), bool)
    again[order[1:]] = np.all([np.diff(column[order]) == 0 for column in columns], axis=0)
    return again & (identity > 0)


def _number(value: Any) -> float | None:
    """A finite number; older files write some as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number >= 0 and number == int(number) and number < 2**53 else None
