"""The events of a trace that count, as arrays, a few dozen bytes each; and what an event is, from category and name."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import CorruptDataError
from hvdkit.read.timeline.measures import Floats, Intervals, union
from hvdkit.read.timeline.model import COLLECTIVE_PREFIXES
from hvdkit.read.trace.events import TraceEvent, TraceFile


class Source(IntEnum):
    """Where an event happened."""

    CPU_OPERATOR = 0
    CPU_RANGE = 1
    KERNEL = 2
    COPY = 3
    HOROVOD = 4
    RUNTIME = 5
    """Calls of the device's runtime that wait for the device; the others are not kept."""


class Kind(IntEnum):
    """What an event counts as."""

    COMPUTATION = 0
    COMMUNICATION = 1
    """A call that communicates, or the wait for one: its thread does nothing else meanwhile."""
    BACKGROUND = 2
    """Communication that other threads go on with: a range around it holds nothing of the training."""
    DATA = 3
    STEP = 4
    RANGE = 5
    """A named range of the script or of PyTorch, which holds other events."""
    COPY = 6
    OTHER = 7
    """Parts of Horovod's timeline in which nothing is exchanged."""


SOURCES = {
    "cpu_op": Source.CPU_OPERATOR,
    "operator": Source.CPU_OPERATOR,  # PyTorch 1.8 to 1.10
    "user_annotation": Source.CPU_RANGE,
    "kernel": Source.KERNEL,
    "cuda_runtime": Source.RUNTIME,
    "cuda_driver": Source.RUNTIME,
    "gpu_memcpy": Source.COPY,
    "memcpy": Source.COPY,
    "gpu_memset": Source.COPY,
    "memset": Source.COPY,
    "horovod": Source.HOROVOD,  # added by `hvdkit timeline merge`
}
"""Category of an event, in lower case, to where it happened; events of other categories do not count."""

LABELS = {
    Kind.COMPUTATION: "operator",
    Kind.COMMUNICATION: "communication",
    Kind.BACKGROUND: "communication",
    Kind.DATA: "data",
    Kind.RANGE: "range",
    Kind.COPY: "copy",
}
"""How the kinds are called in tables; a kernel that computes is called so."""

SYNCHRONISES = re.compile(
    r"aten::(item|_local_scalar_dense|is_nonzero|nonzero|equal)$|(cuda|hip)(Stream|Device|Event)Synchronize"
    r"|cudaMemcpy(_v\d+)?$|cu(Stream|Ctx|Event)Synchronize"
)
"""Names of what the host calls and in which it waits for the device."""
_STEP = re.compile(r"ProfilerStep[#*]\s*([0-9]{1,18})(?![0-9])")
_DATA = re.compile(r"enumerate\(|hvdkit:data")
_KERNEL = re.compile(r"(nccl|rccl|mscclpp|oneccl|ccl_)", re.IGNORECASE)
_BACKGROUND = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):")
_CALL = re.compile(r"(c10d|_c10d_functional|c10d_functional|_c10d_functional_autograd)::|record_param_comms|hvdkit:")
_COMPILED = re.compile(r"Torch-Compiled Region|## Call CompiledFxGraph|CompiledFunction")


def kind_of(source: Source, name: str) -> Kind:
    """What an event counts as.

    Args:
        source: where it happened.
        name: as PyTorch wrote it. Data loading is the range that PyTorch's ``DataLoader`` puts around each batch.
    """
    if source == Source.HOROVOD:
        return Kind.BACKGROUND if name.startswith(COLLECTIVE_PREFIXES) else Kind.OTHER
    if source == Source.COPY:
        return Kind.COPY
    if source == Source.RUNTIME:
        return Kind.OTHER
    if source == Source.KERNEL:
        return Kind.COMMUNICATION if _KERNEL.match(name) else Kind.COMPUTATION
    for pattern, kind in (
        (_STEP, Kind.STEP),
        (_DATA, Kind.DATA),
        (_BACKGROUND, Kind.BACKGROUND),
        (_CALL, Kind.COMMUNICATION),
        (_COMPILED, Kind.COMPUTATION),
    ):
        if pattern.match(name):
            return kind
    return Kind.COMPUTATION if source == Source.CPU_OPERATOR else Kind.RANGE


def step_number(name: str) -> int:
    """The number in the name of a step, as ``ProfilerStep#12``."""
    found = _STEP.match(name)
    return int(found[1]) if found else -1


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
