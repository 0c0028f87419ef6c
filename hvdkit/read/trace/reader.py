"""From a trace's file to the events that count, as arrays, a few dozen bytes each; and what each of them is.

PyTorch writes one JSON object with a large array ``traceEvents`` among small entries. A file that ends early is
refused: what it lost cannot be told.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdkit.common import files
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError
from hvdkit.observe.lateness import Floats
from hvdkit.read.timeline.measures import Intervals, union
from hvdkit.read.timeline.model import COLLECTIVE_PREFIXES

MOST_BYTES = 1 << 32
"""Of a trace, unpacked: four times what its viewers open."""
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class TraceArguments(msgspec.Struct, gc=False):
    """The ``args`` of an event."""

    external: Any = msgspec.field(default=None, name="External id")
    external_before: Any = msgspec.field(default=None, name="external id")


class TraceEvent(msgspec.Struct, gc=False):
    """One event; ``ts`` and ``dur`` in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float | None = None
    dur: float | None = None
    pid: Any = None
    tid: Any = None
    args: TraceArguments | None = None


class Distributed(msgspec.Struct):
    """What ``torch.distributed`` told the profiler."""

    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    world_size: int | None = None


_EVENT = msgspec.json.Decoder(TraceEvent)


@dataclass(frozen=True)
class TraceFile:
    """A trace as it is in its file.

    Attributes:
        path: the file.
        entries: what stands beside the events, as text.
        events: each as text.
    """

    path: Path
    entries: dict[str, msgspec.Raw]
    events: list[msgspec.Raw]

    def decoded(self) -> Iterator[TraceEvent | None]:
        """The events, in the order of the file; None for what is none, such as one whose name is a number."""
        for text in self.events:
            try:
                yield _EVENT.decode(text)
            except _UNREADABLE:
                yield None


def read(path: str | Path) -> TraceFile:
    """Read a trace; the text of its file is held in memory.

    Args:
        path: of a file that ``export_chrome_trace`` wrote, plain or compressed with gzip.
    Raises:
        DataNotFoundError: there is no such file.
        DataError: it cannot be read.
        CorruptDataError: it is no trace, or it is cut off or damaged.
    """
    path = Path(path)
    try:
        content = files.content(path, most=MOST_BYTES, unzip=True)
        entries = {"traceEvents": msgspec.Raw(content)}
        if content.lstrip()[:1] != b"[":
            entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        if "traceEvents" not in entries:
            raise _corrupt(path, 'it has no "traceEvents"')
        return TraceFile(path, entries, msgspec.json.decode(entries.pop("traceEvents"), type=list[msgspec.Raw]))
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"no trace at {str(path)!r}; expected a file that torch.profiler's export_chrome_trace or hvdkit's profile "
            "wrote."
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _corrupt(path, "its compressed data is damaged or cut off") from error
    except _UNREADABLE as error:
        raise _corrupt(path, "it ends in the middle or is damaged") from error
    except OSError as error:
        raise DataError(
            f"cannot read the trace {str(path)!r} ({error.strerror}); give the path of a readable file."
        ) from error


def _corrupt(path: Path, why: str) -> CorruptDataError:
    return CorruptDataError(
        f"{str(path)!r} is not a whole trace of torch.profiler: {why}; expected the JSON that export_chrome_trace "
        "writes, record it again."
    )


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
    "user_annotation": Source.CPU_RANGE,
    "kernel": Source.KERNEL,
    "cuda_runtime": Source.RUNTIME,
    "cuda_driver": Source.RUNTIME,
    "gpu_memcpy": Source.COPY,
    "gpu_memset": Source.COPY,
    "horovod": Source.HOROVOD,  # added by `hvdkit timeline merge`
}
"""Category of an event to where it happened; events of other categories do not count."""

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


_OF = re.compile(r"(?<![0-9])(\d{1,7})-of-(\d{1,7})(?![0-9])")


@dataclass(frozen=True)
class TraceColumns:
    """A trace; times in microseconds of its own clock.

    Attributes:
        path: the file.
        rank, size: of the process; None where neither the file nor its name says so.
        start, end: of the events, (n,), by process and thread, then in order of time, what holds others before them.
        name: index into ``names``.
        source, kind: ``Source`` and ``Kind``.
        thread: a number for each pair of process and thread.
        external: what joins a kernel to the operator that started it; -1 where nothing does.
        names: of the events.
        events: of the whole file.
        skipped: events that could not be used: no number for a time, a negative length.
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
    events: int
    skipped: int

    def covered(self, mask: NDArray[np.bool_]) -> Intervals:
        """What the events of the mask cover together."""
        return union(self.start[mask], self.end[mask])

    @property
    def on_gpu(self) -> NDArray[np.bool_]:
        """Which events are kernels and copies."""
        return np.isin(self.source, (Source.KERNEL, Source.COPY))


def collect(source: str | Path | TraceFile) -> TraceColumns:
    """The events of a trace that count.

    Args:
        source: a file, or what ``read`` gave.
    Raises:
        DataNotFoundError, DataError, CorruptDataError: as ``read``; and where the trace holds no operator, no kernel
            and no range.
    """
    file = source if isinstance(source, TraceFile) else read(source)
    names: dict[tuple[Source, str], int] = {}
    threads: dict[tuple[str, str], int] = {}
    starts, ends = array("d"), array("d")
    ids = array("q")  # name, thread, external, by turns
    skipped = 0
    for event in file.decoded():
        if event is None:
            skipped += 1
            continue
        source_ = SOURCES.get(event.cat)
        if source_ is None or event.ph != "X" or (source_ == Source.RUNTIME and not SYNCHRONISES.match(event.name)):
            continue
        if event.ts is None or event.dur is None or event.dur < 0:
            skipped += 1
            continue
        starts.append(event.ts)
        ends.append(event.ts + event.dur)
        ids.append(names.setdefault((source_, event.name), len(names)))
        ids.append(threads.setdefault((str(event.pid), str(event.tid)), len(threads)))
        ids.append(_external(event.args))
    if not starts:
        raise CorruptDataError(
            f"no operator and no kernel in {str(file.path)!r} ({len(file.events)} events); expected a trace that "
            "torch.profiler recorded with ProfilerActivity.CPU or CUDA."
        )
    start_of, end_of = np.frombuffer(starts, np.float64), np.frombuffer(ends, np.float64)
    name, thread_of, external_of = np.frombuffer(ids, np.int64).reshape(-1, 3).T
    sources = np.array([source_ for source_, _ in names], np.int64)
    kinds = np.array([kind_of(source_, text) for source_, text in names], np.int64)
    order = np.lexsort((-end_of, start_of, thread_of))
    rank, size_of_job = rank_of(file)
    return TraceColumns(
        path=file.path,
        rank=rank,
        size=size_of_job,
        start=start_of[order],
        end=end_of[order],
        name=name[order],
        source=sources[name[order]],
        kind=kinds[name[order]],
        thread=thread_of[order],
        external=external_of[order],
        names=[text for _, text in names],
        events=len(file.events),
        skipped=skipped,
    )


def rank_of(file: TraceFile) -> tuple[int | None, int | None]:
    """Rank and size: of ``distributedInfo``, or else of a name such as trace-0-of-2.json.gz."""
    try:
        distributed = msgspec.json.decode(file.entries.get("distributedInfo", b"{}"), type=Distributed)
    except _UNREADABLE:
        distributed = Distributed()
    named = _OF.search(file.path.name)
    # A process group of one process says nothing about a job whose ranks another library connects.
    if named and (distributed.rank is None or distributed.world_size == 1):
        return int(named[1]), int(named[2])
    return distributed.rank, distributed.world_size


def _external(arguments: TraceArguments | None) -> int:
    """The number that a kernel and the operator that started it carry; -1 for none."""
    if arguments is None:
        return -1
    number = arguments.external_before if arguments.external is None else arguments.external
    return number if type(number) is int and 0 <= number < 2**53 else -1
