"""The file as a stream of events, and what stands around them: memory does not grow with the file's text.

PyTorch writes one JSON object with a large array ``traceEvents`` among small entries. The array is read in pieces; each
is cut between two events and decoded at once. A file that ends early is refused: what it lost cannot be told.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError
from hvdkit.read.timeline.reader import open_file

PIECE = 1 << 20
"""Bytes that are read and decoded at once."""
TRIES = 8
"""Places between two events at which a piece is cut before more of the file is read."""
TAIL = 1 << 16
"""Bytes at the end of a piece in which these are looked for."""
LONGEST_EVENT = 1 << 24
"""Bytes after which something that does not end is not an event."""
LONGEST_HEAD = 1 << 24
"""Bytes before or after the events."""

_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_END = re.compile(rb"\}\s*(\])")
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class TraceArguments(msgspec.Struct, gc=False):
    """The ``args`` of an event."""

    external: Any = msgspec.field(default=None, name="External id")
    external_before: Any = msgspec.field(default=None, name="external id")
    bytes: Any = msgspec.field(default=None, name="Bytes")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    device_type: Any = msgspec.field(default=None, name="Device Type")
    device: Any = msgspec.field(default=None, name="Device Id")


class TraceEvent(msgspec.Struct, gc=False):
    """One event; ``ts`` and ``dur`` in microseconds, as integers or with a fraction."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    args: TraceArguments | None = None


class Distributed(msgspec.Struct):
    """What ``torch.distributed`` told the profiler."""

    rank: Any = None
    world_size: Any = None
    backend: Any = None


_EVENTS = msgspec.json.Decoder(list[TraceEvent])
_TEXTS = msgspec.json.Decoder(list[msgspec.Raw])
_EVENT = msgspec.json.Decoder(TraceEvent)
_DISTRIBUTED = msgspec.json.Decoder(Distributed)


class TraceFile:
    """A trace; iterating over it once reads it. The attributes are complete after that.

    Attributes:
        path: the file.
        distributed: its ``distributedInfo``; None where it has none.
        events: how many it has.
        skipped: how many of them are no events, such as one whose name is a number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.distributed: Distributed | None = None
        self.events = 0
        self.skipped = 0

    def __iter__(self) -> Iterator[list[TraceEvent]]:
        """The events, in the order of the file, a piece at a time.

        Raises:
            DataNotFoundError: there is no such file.
            DataError: it cannot be read.
            CorruptDataError: it is no trace, or it is cut off or damaged.
        """
        try:
            with open_file(self.path) as file:
                yield from self._pieces(file)
        except FileNotFoundError as error:
            raise DataNotFoundError(
                f"no trace at {str(self.path)!r}; expected a file that torch.profiler's export_chrome_trace or "
                "hvdkit's profile wrote."
            ) from error
        except (EOFError, zlib.error) as error:
            raise self._corrupt("its compressed data is damaged or cut off") from error
        except OSError as error:
            raise DataError(
                f"cannot read the trace {str(self.path)!r} ({error.strerror}); give the path of a readable file."
            ) from error

    def _pieces(self, file: BinaryIO) -> Iterator[list[TraceEvent]]:
        rest = self._begin(file)
        while read := file.read(PIECE):
            piece = rest + read
            for cut in _cuts(piece):
                events = self._decode(piece[:cut])
                if events is not None:
                    rest = piece[cut:]
                    yield events
                    break
            else:
                rest = piece
            if len(rest) > LONGEST_EVENT + PIECE:
                raise self._corrupt("something in it is no event and does not end")
        yield self._end(rest)

    def _begin(self, file: BinaryIO) -> bytes:
        """Read up to the first event; returns what was read of the events."""
        head = b""
        while read := file.read(PIECE):
            head += read
            if head.lstrip()[:1] == b"[":
                return head.lstrip()[1:]
            if found := _BEGIN.search(head):
                self._entries(head[: found.start()].rstrip().rstrip(b",") + b"}")
                return head[found.end() :]
            if len(head) > LONGEST_HEAD:
                break
        raise self._corrupt('it has no "traceEvents"')

    def _end(self, rest: bytes) -> list[TraceEvent]:
        """The last events, and the entries behind them."""
        if found := re.match(rb"[\s,]*\]", rest):
            self._entries_behind(rest[found.end() :])
            return []
        for match in _END.finditer(rest):
            events = self._decode(rest[: match.start(1)])
            if events is not None:
                self._entries_behind(rest[match.end(1) :])
                return events
        raise self._corrupt("it ends in the middle or is damaged")

    def _entries_behind(self, text: bytes) -> None:
        text = text.strip()
        if text:
            self._entries(b"{" + text.lstrip(b", \t\r\n"))

    def _entries(self, text: bytes) -> None:
        try:
            entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except _UNREADABLE as error:
            raise self._corrupt("it ends in the middle or is damaged") from error
        if "distributedInfo" in entries:
            try:
                self.distributed = _DISTRIBUTED.decode(entries["distributedInfo"])
            except _UNREADABLE:
                self.distributed = None

    def _decode(self, piece: bytes) -> list[TraceEvent] | None:
        """All events of a piece; None if it is not a list of JSON values."""
        text = b"[" + piece.strip(b" \t\r\n,") + b"]"
        try:
            events = _EVENTS.decode(text)
            self.events += len(events)
            return events
        except msgspec.ValidationError:
            pass
        except _UNREADABLE:
            return None
        try:
            texts = _TEXTS.decode(text)
        except _UNREADABLE:
            return None
        self.events += len(texts)
        return [event for one in texts if (event := self._one(one)) is not None]

    def _one(self, text: msgspec.Raw) -> TraceEvent | None:
        try:
            return _EVENT.decode(text)
        except _UNREADABLE:
            self.skipped += 1
            return None

    def _corrupt(self, why: str) -> CorruptDataError:
        return CorruptDataError(
            f"{str(self.path)!r} is not a whole trace of torch.profiler: {why}; expected the JSON that "
            "export_chrome_trace writes, record it again."
        )


def _cuts(piece: bytes) -> list[int]:
    """Where an event may start, the last first; what looks like that may also lie within an event."""
    found = [match.end() for match in _BETWEEN.finditer(piece, max(0, len(piece) - TAIL))]
    return found[: -TRIES - 1 : -1]
