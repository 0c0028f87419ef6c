"""A timeline and a trace of torch.profiler on one time axis: how much communication hides behind computation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hvdkit.common import files
from hvdkit.common.json_files import Document
from hvdkit.errors import CorruptDataError, DataError
from hvdkit.read.spans import union
from hvdkit.read.timeline import columns as timelines
from hvdkit.read.timeline.reader import CycleMark, Recording, read
from hvdkit.read.trace.reader import Kind, TraceFile, collect
from hvdkit.read.trace.reader import read as read_trace
from hvdkit.read.trace.results import TIMES, TraceTimes
from hvdkit.read.trace.summary import Sets, times_between


class Overlap(Document, frozen=True):
    """Communication and computation while both files were recorded; seconds.

    Attributes:
        found: where that time went.
        computed_by: what counts as computation.
        operations: operations of the timeline whose collective lies there, at least in part.
    """

    kind = "timeline-merge"
    schema = 2
    written_by = "hvdkit timeline merge --json"
    times = TIMES
    unit_s = 1e-3

    found: TraceTimes
    computed_by: str
    operations: int


def merge(timeline: str | Path, trace: str | Path, output: str | Path) -> Overlap:
    """Write a timeline and a profiler trace of rank 0 of the same run to one file, and say how they overlap.

    The output is the trace as it was, with a further process "Horovod" that has one track per tensor. Both clocks
    count from 1970 on the same host, so nothing is fitted.

    Args:
        timeline: written by Horovod.
        trace: written by torch.profiler on rank 0 during the same run.
        output: the file to write, for chrome://tracing or Perfetto; compressed where the name ends in .gz.
    Raises:
        DataNotFoundError, DataError: a file is missing or damaged, the clocks cannot be aligned, the two do not overlap
            in time, or the output cannot be written.
    """
    recording, file = read(timeline), read_trace(trace)
    profile, operations = collect(file), timelines.collect(recording)
    if not profile.are(Kind.OPERATOR, Kind.CALL, Kind.KERNEL, Kind.TRANSFER).any():
        raise CorruptDataError(
            f"no operator and no kernel in {str(trace)!r}; expected a trace that torch.profiler recorded with "
            "ProfilerActivity.CPU and exported with export_chrome_trace."
        )
    if not len(operations.tensor):
        raise DataError(f"no complete operation in {str(timeline)!r}; record both files in the same run.")
    if recording.start_time_since_epoch is None:
        raise DataError(
            f"the clock of {str(recording.path)!r} cannot be aligned: the event that says when the recording started "
            "(start_time_since_epoch_in_micros, the first of the file) is missing; give the whole file."
        )
    base = _base(file)
    shift = (recording.start_time_since_epoch * 1000 - base) / 1000
    first, last = float(operations.begin.min()) + shift, float(operations.end.max()) + shift
    recorded = ~profile.are(Kind.EXCHANGE)
    since, until = float(profile.start[recorded].min()), float(profile.end[recorded].max())
    if first >= until or since >= last:
        raise DataError(
            f"{str(recording.path)!r} and {str(file.path)!r} were recorded "
            f"{max(first - until, since - last) / 1e6:.3g} s apart; give files of the same run."
        )
    exchange, sets = operations.exchange + shift, Sets(profile)
    sets.communication = union(exchange[:, 0], exchange[:, 1])
    begin, end = max(first, since), min(last, until)
    inside = int(np.sum((exchange[:, 0] < end) & (exchange[:, 1] > begin)))
    with files.replacing(Path(output), recording.path, file.path) as merged:
        for text in _texts(recording, file, shift):
            merged.write(text)
    return Overlap(times_between(sets, begin, end), sets.computed_by, inside)


def _base(file: TraceFile) -> int:
    """Nanoseconds since 1970 from which the times of a trace count.

    Source: Kineto's output (torch 2.13): ts and dur in microseconds, baseTimeNanoseconds since 1970.
    """
    try:
        return msgspec.json.decode(file.entries.get("baseTimeNanoseconds", b""), type=int)
    except msgspec.DecodeError as error:
        raise DataError(
            f"the clock of {str(file.path)!r} cannot be aligned: expected baseTimeNanoseconds in the file, nanoseconds "
            "since 1970, as torch.profiler writes it."
        ) from error


def _texts(recording: Recording, file: TraceFile, shift: float) -> Iterator[bytes]:
    """The merged file, in pieces."""
    pids = (event.pid for event in file.decoded() if event is not None)
    pid = max((int(pid) for pid in pids if isinstance(pid, int | float)), default=0) + 1
    yield b'{"traceEvents": [\n'
    for number, text in enumerate(file.events):
        yield (b",\n" if number else b"") + bytes(text)
    for number, event in enumerate(_events(recording, shift, pid)):
        yield (b",\n" if number or file.events else b"") + json.dumps(event).encode()
    yield b"\n]"
    for name, text in file.entries.items():
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
        parts = [(item.kind, item.start, item.end)]  # what encloses before what is enclosed
        if item.negotiate_start is not None and item.negotiate_end is not None:
            parts.insert(0, (f"NEGOTIATE_{item.kind}", item.negotiate_start, item.negotiate_end))
        for name, start, end in (*parts, *sorted(item.phases, key=lambda phase: (phase.start, -phase.end))):
            yield {
                "ph": "X", "cat": "horovod", "name": name, "pid": pid, "tid": tid,
                "ts": start + shift, "dur": end - start,
                "args": {"tensor": item.tensor, "dtype": item.dtype, "bytes": item.bytes},
            }  # fmt: skip


def _named(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
