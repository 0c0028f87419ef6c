"""A trace of PyTorch's profiler: when it was, and when the training computed."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdkit.common import files
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError
from hvdkit.read.timeline.measures import union

Floats = NDArray[np.float64]
EARLIEST_EPOCH = 10**15
"""Microseconds since 1970 (September 2001) below which a time was not counted from 1970."""
_MOST_BYTES = 1 << 30


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float | str | None = None
    dur: float | str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None


@dataclass(frozen=True)
class Trace:
    """A trace as it was read; nothing of it is lost.

    Attributes:
        path: the file.
        base: nanoseconds since 1970 from which its times count; 0 where they count from 1970.
        entries: the other entries of the file's JSON object, as text.
        events: its events, as text.
        since, until: microseconds after ``base`` of its first and its last operation.
        computing: starts and ends of what was computed, joined and in order, in microseconds after ``base``.
        computed_by: what that was, in words.
        largest_pid: of its processes.
    """

    path: Path
    base: int
    entries: dict[str, msgspec.Raw]
    events: list[msgspec.Raw]
    since: float
    until: float
    computing: tuple[Floats, Floats]
    computed_by: str
    largest_pid: int


def read_trace(path: str | Path) -> Trace:
    """A trace that ``torch.profiler.profile.export_chrome_trace`` wrote, as it is or compressed with gzip.

    The whole file is held in memory, about twice its size.

    Args:
        path: of the trace, of the process whose rank wrote the timeline (0).
    Raises:
        DataNotFoundError: there is no such file.
        CorruptDataError: it is not such a trace, or no operation is in it.
        DataError: it cannot be read, or its clock has no known start, so that it cannot be aligned.
    Source: Kineto's output (torch 2.13): ts and dur in microseconds, baseTimeNanoseconds since 1970; before it had a
        base, ts counted from 1970.
    """
    path = Path(path)
    entries, texts, events = _decode(path)
    base = _base(entries, events, path)
    kernels = [event for event in events if event.cat == "kernel" and not event.name.lower().startswith("nccl")]
    computed = _intervals(kernels)
    computed_by = "GPU kernels"
    if not len(computed[0]):
        operators = [event for event in events if event.cat == "cpu_op" and event.ph == "X"]
        computed, thread = _busiest_thread(operators)
        computed_by = f"CPU operators of thread {thread}"
    if not len(computed[0]):
        raise CorruptDataError(
            f"no operator and no kernel in {str(path)!r}; expected a trace that torch.profiler recorded with "
            "ProfilerActivity.CPU and exported with export_chrome_trace."
        )
    starts, ends = _intervals([event for event in events if event.cat in ("cpu_op", "kernel", "user_annotation")])
    pids = [int(event.pid) for event in events if isinstance(event.pid, int | float)]
    return Trace(
        path, base, entries, texts, float(starts[0]), float(ends.max()), computed, computed_by, max(pids, default=0)
    )


def _decode(path: Path) -> tuple[dict[str, msgspec.Raw], list[msgspec.Raw], list[_Event]]:
    """A trace's other entries, its events as they are, and the same events decoded."""
    try:
        content = files.content(path, most=_MOST_BYTES, unzip=True)
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"no trace at {str(path)!r}; expected a file that torch.profiler's export_chrome_trace wrote."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read the trace {str(path)!r} ({error}); give the path of a readable file.") from error
    try:
        if content.lstrip()[:1] == b"[":
            entries = {"traceEvents": msgspec.Raw(content)}
        else:
            entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        text = entries.pop("traceEvents", msgspec.Raw(b"[]"))
        return (
            entries,
            msgspec.json.decode(text, type=list[msgspec.Raw]),
            msgspec.json.decode(text, type=list[_Event]),
        )
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptDataError(
            f"{str(path)!r} is not a trace of torch.profiler ({error}); expected the JSON that "
            "export_chrome_trace writes."
        ) from error


def _base(entries: dict[str, msgspec.Raw], events: list[_Event], path: Path) -> int:
    if "baseTimeNanoseconds" in entries:
        try:
            return msgspec.json.decode(entries["baseTimeNanoseconds"], type=int)
        except msgspec.DecodeError as error:
            raise CorruptDataError(
                f"baseTimeNanoseconds of {str(path)!r} is {bytes(entries['baseTimeNanoseconds'])!r}; expected "
                "nanoseconds since 1970."
            ) from error
    times = [event.ts for event in events if isinstance(event.ts, int | float) and event.ph == "X"]
    if times and min(times) < EARLIEST_EPOCH:
        raise DataError(
            f"the clock of {str(path)!r} cannot be aligned: its times start at {min(times):.0f} us after an unknown "
            "moment; expected baseTimeNanoseconds in the file or times since 1970, as torch.profiler writes them."
        )
    return 0


def _intervals(events: list[_Event]) -> tuple[Floats, Floats]:
    """The disjoint intervals, in order, that these events cover; those without a time or a length cover nothing."""
    pairs = [
        (float(event.ts), float(event.ts + event.dur))
        for event in events
        if isinstance(event.ts, int | float)
        and isinstance(event.dur, int | float)
        and event.dur >= 0
        and math.isfinite(event.ts + event.dur)
    ]
    table = np.array(pairs, np.float64).reshape(-1, 2)
    return union(table[:, 0], table[:, 1])


def _busiest_thread(operators: list[_Event]) -> tuple[tuple[Floats, Floats], object]:
    """What the thread computed that computed longest: the one that trains."""
    threads: dict[tuple[object, object], list[_Event]] = {}
    for event in operators:
        threads.setdefault((event.pid, event.tid), []).append(event)
    best: tuple[Floats, Floats] = (np.zeros(0), np.zeros(0))
    name: object = None
    for (_, tid), events in threads.items():
        found = _intervals(events)
        if (found[1] - found[0]).sum() > (best[1] - best[0]).sum():
            best, name = found, tid
    return best, name
