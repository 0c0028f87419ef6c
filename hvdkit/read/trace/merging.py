"""A timeline and a trace of torch.profiler on one time axis: how much communication hides behind computation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hvdkit.common import files
from hvdkit.common.json_files import Document
from hvdkit.errors import CorruptDataError, DataError, InvalidArgumentError
from hvdkit.read.timeline import columns as timelines
from hvdkit.read.timeline.measures import Floats, Intervals, common, inside, joined, length, union
from hvdkit.read.timeline.model import CycleMark, Operation
from hvdkit.read.timeline.reader import Recording, read
from hvdkit.read.trace.columns import Source, TraceColumns, collect
from hvdkit.read.trace.summary import Sets

LONGEST_OFFSET = 10**12
"""Microseconds (eleven days) past which an offset is no correction of a clock."""
EARLIEST_EPOCH = 10**15
"""Microseconds since 1970 (September 2001) below which a time was not counted from 1970."""
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class TorchProfile:
    """A trace of torch.profiler; nothing of it is lost.

    Attributes:
        path: the file.
        base: nanoseconds since 1970 from which its times count; 0 where they count from 1970.
        entries: the other entries of the file's JSON object, as text.
        events: its events, as text.
        since, until: microseconds after ``base`` of its first and its last operation.
        computing: when something was computed, in microseconds after ``base``.
        computed_by: what that was, in words.
        largest_pid: of its processes.
    """

    path: Path
    base: int
    entries: dict[str, msgspec.Raw]
    events: list[msgspec.Raw]
    since: float
    until: float
    computing: Intervals
    computed_by: str
    largest_pid: int


class _Process(msgspec.Struct, gc=False):
    pid: Any = None


class Overlap(Document, frozen=True):
    """Communication and computation while both files were recorded; seconds.

    Attributes:
        window: from the first to the last operation of the trace, as far as the timeline has operations there.
        communication: at least one collective ran.
        computation: something was computed.
        overlapped: both at once.
        exposed: communication without computation.
        neither: neither of them, such as waiting for data or for Horovod.
        computed_by: what counts as computation.
        operations: operations of the timeline whose collective lies in the window, at least in part.
    """

    kind = "timeline-merge"
    written_by = "hvdkit timeline merge --json"
    times = frozenset(["window", "communication", "computation", "overlapped", "exposed", "neither"])
    unit_s = 1e-3

    window: float
    communication: float
    computation: float
    overlapped: float
    exposed: float
    neither: float
    computed_by: str
    operations: int


def merge(timeline: str | Path, trace: str | Path, output: str | Path, *, offset_us: float = 0.0) -> Overlap:
    """Write a timeline and a profiler trace of rank 0 of the same run to one file, and say how they overlap.

    The output is the trace as it was, with a further process "Horovod" that has one track per tensor. Both clocks
    count from 1970 on the same host, so nothing is fitted.

    Args:
        timeline: written by Horovod.
        trace: written by torch.profiler on rank 0 during the same run.
        output: the file to write, for chrome://tracing or Perfetto; compressed where the name ends in .gz.
        offset_us: microseconds to add to the times of the trace, where its clock is known to be off.
    Raises:
        InvalidArgumentError: an offset that is no number of microseconds.
        DataNotFoundError, DataError: a file is missing or damaged, the clocks cannot be aligned, the two do not overlap
            in time, or the output cannot be written.
    """
    if not abs(offset_us) <= LONGEST_OFFSET:
        raise InvalidArgumentError(f"the offset must be microseconds, at most {LONGEST_OFFSET:g}, got {offset_us:g}.")
    recording, profile = read(timeline), read_profile(Path(trace))
    columns = timelines.collect(recording)
    if not len(columns.tensor):
        raise DataError(f"no complete operation in {str(timeline)!r}; record both files in the same run.")
    shift = _shift(recording, profile) - offset_us
    first, last = float(columns.begin.min()) + shift, float(columns.end.max()) + shift
    _require_common_time(recording, profile, first, last)
    overlap = _overlap(columns.exchange + shift, profile, max(first, profile.since), min(last, profile.until))
    with files.replacing(Path(output), recording.path, profile.path) as file:
        for text in _texts(recording, profile, shift):
            file.write(text)
    return overlap


def read_profile(path: Path) -> TorchProfile:
    """A trace that ``torch.profiler.profile.export_chrome_trace`` wrote, as it is or compressed with gzip.

    The whole file is held in memory, about twice its size.

    Args:
        path: of the trace, of the process whose rank wrote the timeline (0).
    Raises:
        DataNotFoundError, CorruptDataError: as ``columns.collect``; or no operator and no kernel is in it.
        DataError: it cannot be read, or its clock has no known start, so that it cannot be aligned.
    Source: Kineto's output (torch 2.13): ts and dur in microseconds, baseTimeNanoseconds since 1970; before it had a
        base, ts counted from 1970.
    """
    columns = collect(path)
    if not np.isin(columns.source, (Source.CPU_OPERATOR, Source.KERNEL)).any():
        raise CorruptDataError(
            f"no operator and no kernel in {str(path)!r}; expected a trace that torch.profiler recorded with "
            "ProfilerActivity.CPU and exported with export_chrome_trace."
        )
    try:
        content = files.content(path, most=_MOST_BYTES, unzip=True)
    except OSError as error:
        raise DataError(f"cannot read the trace {str(path)!r} ({error}); give the path of a readable file.") from error
    try:
        entries = {"traceEvents": msgspec.Raw(content)}
        if content.lstrip()[:1] != b"[":
            entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        events = entries.pop("traceEvents")
        texts = msgspec.json.decode(events, type=list[msgspec.Raw])
        pids = [one.pid for one in msgspec.json.decode(events, type=list[_Process])]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDataError(
            f"{str(path)!r} is not a trace of torch.profiler ({error}); expected the JSON that export_chrome_trace "
            "writes."
        ) from error
    recorded = columns.source != Source.HOROVOD
    sets = Sets(columns)
    return TorchProfile(
        path=path,
        base=_base(entries, columns),
        entries=entries,
        events=texts,
        since=float(columns.start[recorded].min()),
        until=float(columns.end[recorded].max()),
        computing=sets.computation,
        computed_by=sets.computed_by,
        largest_pid=max((int(pid) for pid in pids if isinstance(pid, int | float)), default=0),
    )


def _base(entries: dict[str, msgspec.Raw], columns: TraceColumns) -> int:
    if "baseTimeNanoseconds" in entries:
        try:
            return msgspec.json.decode(entries["baseTimeNanoseconds"], type=int)
        except msgspec.DecodeError as error:
            raise CorruptDataError(
                f"baseTimeNanoseconds of {str(columns.path)!r} is {bytes(entries['baseTimeNanoseconds'])!r}; expected "
                "nanoseconds since 1970."
            ) from error
    if columns.start.min() < EARLIEST_EPOCH:
        raise DataError(
            f"the clock of {str(columns.path)!r} cannot be aligned: its times start at {columns.start.min():.0f} us "
            "after an unknown moment; expected baseTimeNanoseconds in the file or times since 1970, as torch.profiler "
            "writes them."
        )
    return 0


def _shift(recording: Recording, profile: TorchProfile) -> float:
    """Microseconds to add to a time of the timeline to have it on the axis of the trace."""
    start = recording.start_time_since_epoch
    if start is None:
        raise DataError(
            f"the clock of {str(recording.path)!r} cannot be aligned: the event that says when the recording started "
            "(start_time_since_epoch_in_micros, the first of the file) is missing; give the whole file."
        )
    return (start * 1000 - profile.base) / 1000


def _require_common_time(recording: Recording, profile: TorchProfile, first: float, last: float) -> None:
    if first < profile.until and profile.since < last:
        return
    apart = max(first - profile.until, profile.since - last) / 1e6
    raise DataError(
        f"{str(recording.path)!r} (operations from {_clock(profile, first)} to {_clock(profile, last)} UTC) and "
        f"{str(profile.path)!r} ({_clock(profile, profile.since)} to {_clock(profile, profile.until)} UTC) are "
        f"{apart:.3g} s apart; give files of the same run, or --offset-us with what to add to the trace's times."
    )


def _clock(profile: TorchProfile, time: float) -> str:
    try:
        return datetime.fromtimestamp(profile.base / 1e9 + time / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return "an impossible date"


def _overlap(exchange: Floats, profile: TorchProfile, since: float, until: float) -> Overlap:
    """Milliseconds of communication, of computation and of both, between two times in microseconds."""
    communicating, computing = (
        inside(one, since, until) for one in (union(exchange[:, 0], exchange[:, 1]), profile.computing)
    )
    both = common(communicating, computing)
    return Overlap(
        window=(until - since) / 1e3,
        communication=length(communicating) / 1e3,
        computation=length(computing) / 1e3,
        overlapped=length(both) / 1e3,
        exposed=(length(communicating) - length(both)) / 1e3,
        neither=max(0.0, until - since - length(joined(communicating, computing))) / 1e3,
        computed_by=profile.computed_by,
        operations=int(np.sum((exchange[:, 0] < until) & (exchange[:, 1] > since))),
    )


def _texts(recording: Recording, profile: TorchProfile, shift: float) -> Iterator[bytes]:
    """The merged file, in pieces."""
    yield b'{"traceEvents": [\n'
    for number, text in enumerate(profile.events):
        yield (b",\n" if number else b"") + bytes(text)
    pid = profile.largest_pid + 1
    for number, event in enumerate(_events(recording, shift, pid)):
        yield (b",\n" if number or profile.events else b"") + json.dumps(event).encode()
    yield b"\n]"
    for name, text in profile.entries.items():
        yield b",\n" + json.dumps(name).encode() + b": " + bytes(text)
    yield b"}\n"


def _events(recording: Recording, shift: float, pid: int) -> Iterator[dict[str, Any]]:
    """The timeline as events of one process with one thread per tensor."""
    yield _named("process_name", "Horovod (timeline of rank 0)", pid, 0)
    yield _named("thread_name", "cycles", pid, 0)
    tracks: dict[str, int] = {}
    for item in recording.items():
        if isinstance(item, CycleMark):
            yield {"ph": "i", "s": "t", "name": "CYCLE_START", "ts": item.time + shift, "pid": pid, "tid": 0}
            continue
        tid = tracks.get(item.tensor)
        if tid is None:
            tid = tracks[item.tensor] = len(tracks) + 1
            yield _named("thread_name", item.tensor, pid, tid)
        for name, start, end in _parts(item):
            yield {
                "ph": "X", "cat": "horovod", "name": name, "pid": pid, "tid": tid,
                "ts": start + shift, "dur": end - start,
                "args": {"tensor": item.tensor, "dtype": item.dtype, "bytes": item.bytes},
            }  # fmt: skip


def _named(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _parts(operation: Operation) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of the negotiation, the operation and its phases, what encloses before what is enclosed."""
    if operation.negotiate_start is not None and operation.negotiate_end is not None:
        yield f"NEGOTIATE_{operation.kind}", operation.negotiate_start, operation.negotiate_end
    yield operation.kind, operation.start, operation.end
    yield from sorted(operation.phases, key=lambda phase: (phase.start, -phase.end))
