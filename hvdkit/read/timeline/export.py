"""A timeline for other programs: a native Perfetto trace, or a table as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hvdkit.common.extras import of_extra
from hvdkit.common.files import replacing
from hvdkit.common.json_files import Document
from hvdkit.errors import CorruptDataError, InvalidArgumentError
from hvdkit.read.timeline.model import GROUPS, CycleMark, Operation, group_of
from hvdkit.read.timeline.reader import Recording, read

COLUMNS = (
    "tensor", "kind", "dtype", "shape", "bytes", "fused", "begin_us", "start_us", "end_us",
    *(f"{group.replace(' ', '_')}_us" for group in GROUPS),
)  # fmt: skip
"""Of the CSV file; the last ones are the time in each group of phases, empty where an operation has none."""
_SEQUENCE = 1
_ROOT, _CYCLES, _FIRST_TENSOR = 1, 2, 3


class Exported(Document, frozen=True):
    """What was written for another program.

    Attributes:
        path: the file.
        operations: complete ones.
        tensors: of these.
        cycles: marks of them, which a CSV file leaves out.
    """

    kind = "timeline-export"
    written_by = "hvdkit timeline export --json"

    path: str
    operations: int
    tensors: int
    cycles: int


def export(source: str | Path, output: str | Path) -> Exported:
    """Write the operations of a timeline to a file for other programs, as a stream.

    Args:
        source: a timeline file.
        output: ends in .pftrace (for https://ui.perfetto.dev, one track per tensor with its negotiation below it, one
            for the cycles) or in .csv (a row per operation, times in microseconds since the recording started); .gz may
            follow.
    Raises:
        InvalidArgumentError: another ending.
        DataNotFoundError, DataError: no such file, no operation in it, or the output cannot be written.
        MissingFrameworkError: the package perfetto is not installed.
    Source: Perfetto's TracePacket, TrackDescriptor and TrackEvent (docs/reference/synthetic-track-event); RFC 4180.
    """
    recording, output = read(source), Path(output)
    ending = output.with_suffix("").suffix if output.suffix == ".gz" else output.suffix
    if ending not in (".pftrace", ".csv"):
        raise InvalidArgumentError(f"the output {str(output)!r} must end in .pftrace or .csv (.gz may follow).")
    with replacing(output, recording.path) as file:
        writer = _PerfettoWriter(file) if ending == ".pftrace" else _CsvWriter(file)
        return _write(recording, writer, output)


def _write(recording: Recording, writer: _PerfettoWriter | _CsvWriter, output: Path) -> Exported:
    """Hand each operation and mark to the writer; gives their numbers. An error where there is no operation."""
    tensors: set[str] = set()
    operations = cycles = 0
    for number, batch in enumerate(recording.batches()):
        if not number:
            writer.start(recording.start_time_since_epoch)
        for item in batch:
            if isinstance(item, CycleMark):
                cycles += 1
                writer.cycle(item)
            else:
                operations += 1
                tensors.add(item.tensor)
                writer.operation(item)
        writer.flush()
    if not operations:
        raise CorruptDataError(
            f"no complete operation in {str(recording.path)!r}; give a file that Horovod wrote with HOROVOD_TIMELINE."
        )
    return Exported(str(output), operations, len(tensors), cycles)


class _CsvWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._text = io.StringIO(newline="")
        self._rows = csv.writer(self._text)
        self._file = file

    def start(self, start_time_since_epoch: int | None) -> None:  # noqa: ARG002
        self._rows.writerow(COLUMNS)

    def cycle(self, mark: CycleMark) -> None:
        """A table of operations has no place for it."""

    def operation(self, operation: Operation) -> None:
        spent = dict.fromkeys(GROUPS, math.nan)
        if operation.negotiate_start is not None and operation.negotiate_end is not None:
            spent["negotiate"] = operation.negotiate_end - operation.negotiate_start
        for phase in operation.phases:
            group = group_of(phase.name)
            known = spent[group]
            spent[group] = phase.end - phase.start + (0.0 if math.isnan(known) else known)
        shape = "" if operation.shape is None else "x".join(map(str, operation.shape)) or "scalar"
        times = (operation.begin, operation.start, operation.end, *spent.values())
        size = "" if operation.bytes is None else operation.bytes
        self._rows.writerow(
            (operation.tensor, operation.kind, operation.dtype, shape, size, int(operation.fused), *map(_number, times))
        )

    def flush(self) -> None:
        self._file.write(self._text.getvalue().encode("utf-8", "replace"))
        self._text.seek(0)
        self._text.truncate()


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}".rstrip("0").rstrip(".")


class _PerfettoWriter:
    def __init__(self, file: IO[bytes]) -> None:
        with of_extra("analysis", "a .pftrace file is written with the package perfetto", ", or export to .csv"):
            from perfetto.protos.perfetto.trace import perfetto_trace_pb2
        self._protos: Any = perfetto_trace_pb2
        self._packets: Any = perfetto_trace_pb2.Trace()
        self._file = file
        self._tracks: dict[str, int] = {}

    def start(self, start_time_since_epoch: int | None) -> None:
        if start_time_since_epoch is not None:
            self._clocks(start_time_since_epoch)
        self._describe(_ROOT, "Horovod", None)
        self._describe(_CYCLES, "cycles", _ROOT)

    def cycle(self, mark: CycleMark) -> None:
        self._event(self._protos.TrackEvent.TYPE_INSTANT, _CYCLES, mark.time, "CYCLE_START")

    def operation(self, operation: Operation) -> None:
        track = self._track(operation.tensor)
        if operation.negotiate_start is not None and operation.negotiate_end is not None:
            name = f"NEGOTIATE_{operation.kind}"
            self._begin(track + 1, operation.negotiate_start, name)
            for rank, time in sorted(operation.ticks.items(), key=lambda tick: tick[1]):
                self._event(self._protos.TrackEvent.TYPE_INSTANT, track + 1, time, f"rank {rank} ready")
            self._end(track + 1, operation.negotiate_end)
        event = self._begin(track, operation.start, operation.kind)
        for name, value in (("dtype", operation.dtype), ("shape", str(list(operation.shape or ())))):
            event.debug_annotations.add(name=name, string_value=value.encode("utf-8", "replace").decode())
        if operation.bytes is not None and operation.bytes < 1 << 64:
            event.debug_annotations.add(name="bytes", uint_value=operation.bytes)
        for time, phase in _nested(operation):
            if phase is None:
                self._end(track, time)
            else:
                self._begin(track, time, phase)
        self._end(track, operation.end)

    def flush(self) -> None:
        self._file.write(self._packets.SerializeToString())
        self._packets = self._protos.Trace()

    def _track(self, tensor: str) -> int:
        track = self._tracks.get(tensor)
        if track is None:
            track = self._tracks[tensor] = _FIRST_TENSOR + 2 * len(self._tracks)
            self._describe(track, tensor, _ROOT)
            self._describe(track + 1, "negotiation", track)
        return track

    def _packet(self) -> Any:
        return self._packets.packet.add(trusted_packet_sequence_id=_SEQUENCE)

    def _describe(self, uuid: int, name: str, parent: int | None) -> None:
        descriptor = self._packet().track_descriptor
        descriptor.uuid = uuid
        descriptor.name = name
        if parent is not None:
            descriptor.parent_uuid = parent

    def _clocks(self, start_time_since_epoch: int) -> None:
        """Say when time 0 of the trace was, so that Perfetto can show the date."""
        snapshot = self._packet().clock_snapshot
        snapshot.clocks.add(clock_id=self._protos.BUILTIN_CLOCK_BOOTTIME, timestamp=0)
        snapshot.clocks.add(clock_id=self._protos.BUILTIN_CLOCK_REALTIME, timestamp=start_time_since_epoch * 1000)

    def _event(self, kind: int, track: int, time: float, name: str | None = None) -> Any:
        packet = self._packet()
        packet.timestamp = round(time * 1000)
        event = packet.track_event
        event.type = kind
        event.track_uuid = track
        if name is not None:
            event.name = name
        return event

    def _begin(self, track: int, time: float, name: str) -> Any:
        return self._event(self._protos.TrackEvent.TYPE_SLICE_BEGIN, track, time, name)

    def _end(self, track: int, time: float) -> None:
        self._event(self._protos.TrackEvent.TYPE_SLICE_END, track, time)


def _nested(operation: Operation) -> Iterator[tuple[float, str | None]]:
    """The phases as times at which one begins (with its name) or the innermost one ends (None), properly nested."""
    open_until: list[float] = []
    for name, start, end in sorted(operation.phases, key=lambda phase: (phase.start, -phase.end)):
        while open_until and open_until[-1] <= start:
            yield open_until.pop(), None
        yield start, name
        open_until.append(min(end, open_until[-1]) if open_until else end)
    while open_until:
        yield open_until.pop(), None
