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
from hvdkit.read.spans import Intervals, union
from hvdkit.read.timeline.reader import COLLECTIVE_PREFIXES

MOST_BYTES = 1 << 32
"""Of a trace, unpacked: four times what its viewers open."""
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class TraceEvent(msgspec.Struct, gc=False):
    """One event; ``ts`` and ``dur`` in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float | None = None
    dur: float | None = None
    pid: Any = None
    tid: Any = None


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


class Kind(IntEnum):
    """What an event is: what happened, and on which side."""

    OPERATOR = 0
    CALL = 1
    """A call that communicates, or the wait for one: its thread does nothing else meanwhile."""
    BACKGROUND = 2
    """Communication that other threads go on with: a range around it holds nothing of the training."""
    DATA = 3
    STEP = 4
    RANGE = 5
    """A named range of the script or of PyTorch, which holds other events."""
    KERNEL = 6
    TRANSFER = 7
    """A kernel that communicates."""
    COPY = 8
    SYNCHRONISATION = 9
    """A call of the device's runtime that waits for the device; the others are not kept."""
    EXCHANGE = 10
    """A collective of Horovod's timeline, which `hvdkit timeline merge` added."""


ON_GPU = (Kind.KERNEL, Kind.TRANSFER, Kind.COPY)
LABELS = {
    Kind.OPERATOR: "operator",
    Kind.CALL: "communication",
    Kind.BACKGROUND: "communication",
    Kind.DATA: "data",
    Kind.RANGE: "range",
    Kind.KERNEL: "kernel",
    Kind.TRANSFER: "communication",
    Kind.COPY: "copy",
}
"""How the kinds are called in tables of operators; the others are none."""
SYNCHRONISES = re.compile(
    r"aten::(item|_local_scalar_dense|is_nonzero|nonzero|equal)$|(cuda|hip)(Stream|Device|Event)Synchronize"
    r"|cudaMemcpy(_v\d+)?$|cu(Stream|Ctx|Event)Synchronize"
)
"""Names of what the host calls and in which it waits for the device."""
STEP_NAME = re.compile(r"ProfilerStep[#*]\s*([0-9]{1,18})(?![0-9])")
"""With the number of the step."""
_ANY = re.compile("")
_ON_CPU = (
    (STEP_NAME, Kind.STEP),
    (re.compile(r"enumerate\(|hvdkit:data"), Kind.DATA),  # what PyTorch's DataLoader puts around each batch
    (re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):"), Kind.BACKGROUND),
    (re.compile(r"_?c10d(_functional(_autograd)?)?::|record_param_comms|hvdkit:"), Kind.CALL),
    (re.compile(r"Torch-Compiled Region|## Call CompiledFxGraph|CompiledFunction"), Kind.OPERATOR),
)
_KINDS = {
    "cpu_op": (*_ON_CPU, (_ANY, Kind.OPERATOR)),
    "user_annotation": (*_ON_CPU, (_ANY, Kind.RANGE)),
    "kernel": ((re.compile(r"(?i)nccl|rccl|mscclpp|oneccl|ccl_"), Kind.TRANSFER), (_ANY, Kind.KERNEL)),
    "cuda_runtime": ((SYNCHRONISES, Kind.SYNCHRONISATION),),
    "cuda_driver": ((SYNCHRONISES, Kind.SYNCHRONISATION),),
    "gpu_memcpy": ((_ANY, Kind.COPY),),
    "gpu_memset": ((_ANY, Kind.COPY),),
    "horovod": ((re.compile("|".join(COLLECTIVE_PREFIXES)), Kind.EXCHANGE),),
}
"""Category of an event to how its name begins, and what it is then; all other events do not count."""


def kind_of(category: str, name: str) -> Kind | None:
    """What an event is, by its category and its name as PyTorch wrote them; None for one that does not count."""
    return next((kind for pattern, kind in _KINDS[category] if pattern.match(name)), None)


_OF = re.compile(r"(?<![0-9])(\d{1,7})-of-(\d{1,7})(?![0-9])")


@dataclass(frozen=True)
class TraceColumns:
    """A trace; times in microseconds of its own clock.

    Attributes:
        path: the file.
        rank, size: of the process; None where neither the file nor its name says so.
        start, end: of the events, (n,), by process and thread, then in order of time, what holds others before them.
        name: index into ``names``.
        kind: see ``Kind``.
        thread: a number for each pair of process and thread.
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
    kind: NDArray[np.int64]
    thread: NDArray[np.int64]
    names: list[str]
    events: int
    skipped: int

    def are(self, *kinds: Kind) -> NDArray[np.bool_]:
        """Which events are of these kinds."""
        return np.isin(self.kind, kinds)

    def covered(self, mask: NDArray[np.bool_]) -> Intervals:
        """What the events of the mask cover together."""
        return union(self.start[mask], self.end[mask])


def collect(source: str | Path | TraceFile) -> TraceColumns:
    """The events of a trace that count.

    Args:
        source: a file, or what ``read`` gave.
    Raises:
        DataNotFoundError, DataError, CorruptDataError: as ``read``; and where the trace holds no operator, no kernel
            and no range.
    """
    file = source if isinstance(source, TraceFile) else read(source)
    names: dict[tuple[str, str], int] = {}
    kinds: dict[tuple[str, str], Kind | None] = {}
    threads: dict[tuple[str, str], int] = {}
    starts, ends = array("d"), array("d")
    ids = array("q")  # name, thread, by turns
    skipped = 0
    for event in file.decoded():
        if event is None:
            skipped += 1
            continue
        if event.ph != "X" or event.cat not in _KINDS:
            continue
        key = event.cat, event.name
        if key not in kinds:
            kinds[key] = kind_of(*key)
        if kinds[key] is None:
            continue
        if event.ts is None or event.dur is None or event.dur < 0:
            skipped += 1
            continue
        starts.append(event.ts)
        ends.append(event.ts + event.dur)
        ids.append(names.setdefault(key, len(names)))
        ids.append(threads.setdefault((str(event.pid), str(event.tid)), len(threads)))
    if not starts:
        raise CorruptDataError(
            f"no operator and no kernel in {str(file.path)!r} ({len(file.events)} events); expected a trace that "
            "torch.profiler recorded with ProfilerActivity.CPU or CUDA."
        )
    start_of, end_of = np.frombuffer(starts, np.float64), np.frombuffer(ends, np.float64)
    name, thread_of = np.frombuffer(ids, np.int64).reshape(-1, 2).T
    order = np.lexsort((-end_of, start_of, thread_of))
    rank, size_of_job = rank_of(file)
    return TraceColumns(
        path=file.path,
        rank=rank,
        size=size_of_job,
        start=start_of[order],
        end=end_of[order],
        name=name[order],
        kind=np.array([kinds[key] for key in names], np.int64)[name[order]],
        thread=thread_of[order],
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
