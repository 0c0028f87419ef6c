"""What a timeline holds: from the file to operations, as a stream, so that memory does not grow with the file.

The file is one JSON array, mostly in one line, and may end anywhere. It is read in pieces; each piece is cut between
two events and decoded at once. Only a piece that is not valid JSON is looked at event by event. Begins are paired with
ends, tensor by tensor.
"""

from __future__ import annotations

import functools
import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec

from hvdkit.common import files
from hvdkit.common.units import ITEM_SIZES
from hvdkit.errors import DataError, DataNotFoundError

COLLECTIVE_PREFIXES = ("MPI_", "NCCL_", "GLOO_", "CCL_", "DDL_")
"""How the names of the phases start in which data is exchanged between ranks."""
GROUPS = ("negotiate", "wait for data", "queue", "set up", "memcpy in", "collective", "memcpy out", "other")
"""Into what the phases of all operations and of all libraries are sorted, in the order in which they happen."""
_GROUP_OF = (
    (COLLECTIVE_PREFIXES, "collective"),
    ("NEGOTIATE_", "negotiate"),
    ("WAIT_FOR_", "wait for data"),
    ("QUEUE", "queue"),
    ("MEMCPY_IN_", "memcpy in"),
    ("MEMCPY_OUT_", "memcpy out"),
    (("INIT_", "ALLOCATE_"), "set up"),
)
LATEST = 1e17
"""Microseconds (three thousand years) past which a time is damage."""
PIECE = 1 << 17
"""Bytes that are read and decoded at once."""
TRIES = 4
"""Places between two events at which a piece is cut before it is looked at event by event."""
LONGEST_EVENT = 1 << 16
"""Bytes after which something that does not end is not an event."""
LONGEST_GAP = 1 << 24
"""Bytes without an event after which the rest is not read: a hole, or zeros that unpack from nearly nothing."""
_BETWEEN = re.compile(rb"(?<=\})\s*,?\s*(?=\{)")
"""Between two events; a name may look like that, too."""
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_SHAPE = msgspec.json.Decoder(tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...])


class TimelineArguments(msgspec.Struct, gc=False):
    """The ``args`` of an event."""

    name: str = ""
    dtype: str = ""
    shape: str = ""
    start_time_since_epoch_in_micros: int | None = None


class TimelineEvent(msgspec.Struct, gc=False):
    """One event of the file; ``ts`` in microseconds since the recording started."""

    ph: str = ""
    name: str = ""
    ts: float = -1.0
    pid: int = -1
    args: TimelineArguments | None = None


_EVENT, _EVENTS = msgspec.json.Decoder(TimelineEvent), msgspec.json.Decoder(list[TimelineEvent])


class Phase(NamedTuple):
    """One named part of an operation, such as MPI_ALLREDUCE; times as in Operation."""

    name: str
    start: float
    end: float


class CycleMark(NamedTuple):
    """The start of one cycle of Horovod's background thread (HOROVOD_TIMELINE_MARK_CYCLES=1)."""

    time: float


@dataclass(slots=True)
class Operation:
    """One collective of one tensor. All times in microseconds since the recording started.

    Attributes:
        tensor: the name of the tensor ("pid 7" where the file lost it).
        kind: "ALLREDUCE", "BROADCAST", "ALLGATHER", ...
        start: when all ranks were known to be ready and the work on the tensor started.
        end: when the work was done.
        negotiate_start: when the coordinator (rank 0) first heard of the tensor; None where the file does not say.
        negotiate_end: when all ranks had announced it; None where the file does not say.
        ticks: rank to the time at which the coordinator heard from it. Horovod writes it only where the tensor was
            not in its response cache, so that it is empty in most operations.
        phases: what happened between start and end, in the order in which it ended.
        dtype: the type's name ("" where the file does not say).
        shape: the shape of the result on the coordinator; None where the file does not say.
        bytes: its size; None where shape or type are unknown.
    """

    tensor: str
    kind: str
    start: float
    end: float
    negotiate_start: float | None
    negotiate_end: float | None
    ticks: dict[int, float]
    phases: list[Phase]
    dtype: str
    shape: tuple[int, ...] | None
    bytes: int | None

    @property
    def begin(self) -> float:
        """The first time known of this operation: of its negotiation, or of its work."""
        return self.start if self.negotiate_start is None else self.negotiate_start


def group_of(phase: str) -> str:
    """The entry of GROUPS to which a phase belongs.

    Args:
        phase: a name as Horovod writes it, e.g. "WAIT_FOR_OTHER_TENSOR_DATA" or "NEGOTIATE_ALLREDUCE".
    """
    return next((group for beginnings, group in _GROUP_OF if phase.startswith(beginnings)), "other")


@functools.lru_cache(maxsize=10_000)
def shape_and_bytes(dtype: str, text: str) -> tuple[tuple[int, ...] | None, int | None]:
    """The shape that Horovod writes as "[3, 3, 1, 32]" ("[]" for a scalar), and the bytes of a tensor of it.

    None for any other text; as bytes also for an unknown type, or more than any memory holds.
    """
    try:
        shape = _SHAPE.decode(text)
    except msgspec.MsgspecError:
        return None, None
    size = ITEM_SIZES.get(dtype, 0) * math.prod(shape)
    return shape, size if dtype in ITEM_SIZES and size < 1 << 60 else None


class _Open:
    """What is known of the operation of one tensor that has not ended yet."""

    __slots__ = ("negotiate_end", "negotiate_start", "negotiated", "phases", "stack", "ticks")

    def __init__(self) -> None:
        self.stack: list[tuple[str, float]] = []
        self.clear()

    def clear(self) -> None:
        self.negotiated = ""
        self.negotiate_start: float | None = None
        self.negotiate_end: float | None = None
        self.ticks: dict[int, float] = {}
        self.phases: list[Phase] = []


class Recording:
    """A timeline file. Iterating over it reads the file and yields its operations in the order in which they ended.

    It can be iterated over any number of times, one iteration at a time. The attributes describe the last iteration,
    and are complete when that is.

    Attributes:
        path: the file.
        start_time_since_epoch: when the recording started, in microseconds since 1970; None where the file lost it.
        dropped: what could not be used, as reason to number of events, such as {"cut off at the end": 1}.
        events: number of events that could be decoded.
    """

    def __init__(self, path: Path) -> None:
        """Takes a file that is there; use ``read``, which checks it."""
        self.path = path
        self._start_over()

    def _start_over(self) -> None:
        self.start_time_since_epoch: int | None = None
        self.dropped: Counter[str] = Counter()
        self.events = 0
        self._names: dict[int, str] = {}
        self._open: dict[int, _Open] = {}

    def __iter__(self) -> Iterator[Operation]:
        """The operations, in the order in which they ended."""
        return (item for item in self.items() if isinstance(item, Operation))

    def items(self) -> Iterator[Operation | CycleMark]:
        """Operations and marks of cycles, in the order of the file (operations where they end)."""
        self._start_over()
        with ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(files.opened(self.path))
            packed = file.read(2) == files.GZIP_MAGIC
            file.seek(0)
            # of what is cut off or damaged read1 gives what comes before
            content = stack.enter_context(gzip.GzipFile(fileobj=file)).read1 if packed else file.read
            for events in _pieces(content, self.dropped):
                self.events += len(events)
                yield from self._ended(events)
        unfinished = sum(bool(state.stack or state.negotiated) for state in self._open.values())
        if unfinished:
            self.dropped["operation not finished at the end"] += unfinished

    def _ended(self, events: Sequence[TimelineEvent]) -> list[Operation | CycleMark]:
        """The operations that end and the cycles that start in the events that come next."""
        done: list[Operation | CycleMark] = []
        opened, dropped = self._open, self.dropped
        new_tuple = tuple.__new__  # a third of the time of Phase(...), of which there are millions
        for event in events:
            ph, ts = event.ph, event.ts
            state = opened.get(event.pid)
            if not 0 <= ts < LATEST:
                if ph == "M":
                    self._name(event)
                else:
                    dropped["no time"] += 1
            elif ph == "B":
                if state is None:
                    state = opened[event.pid] = _Open()
                name, stack = event.name, state.stack
                if name[:10] == "NEGOTIATE_":  # a new operation: what an earlier one left open has lost its end
                    if stack or state.negotiated:
                        dropped["begin without an end"] += len(stack) or 1
                        stack.clear()
                        state.clear()
                    state.negotiated, state.negotiate_start = name[10:], ts
                elif stack and stack[0][0][:10] == "NEGOTIATE_":
                    dropped["begin without an end"] += len(stack)
                    stack.clear()
                stack.append((name, ts))
            elif ph == "E":
                if state is None or not (stack := state.stack):
                    dropped["end without a begin"] += 1
                    continue
                name, start = stack.pop()
                if stack and ts >= start:
                    state.phases.append(new_tuple(Phase, (name, start, ts)))
                elif ts < start:
                    dropped["ends before it begins"] += 1
                    if not stack:
                        state.clear()
                elif name[:10] == "NEGOTIATE_":
                    state.negotiate_end = ts
                else:
                    done.append(self._operation(event, state, name, start))
                    state.clear()
            elif ph == "X":
                if state is None or not state.stack or not (event.name.isascii() and event.name.isdecimal()):
                    dropped["unknown event"] += 1
                elif len(event.name) < 10:
                    state.ticks[int(event.name)] = ts
            elif event.name == "CYCLE_START":
                done.append(CycleMark(ts))
            elif ph == "M":
                self._name(event)
            else:
                dropped["unknown event"] += 1
        return done

    def _operation(self, event: TimelineEvent, state: _Open, kind: str, start: float) -> Operation:
        """The operation that this event ends, of what is open on its tensor."""
        dtype = event.args.dtype if event.args else ""
        shape, size = shape_and_bytes(dtype, event.args.shape) if event.args else (None, None)
        negotiated = state.negotiated == kind
        return Operation(
            self._names.get(event.pid) or f"pid {event.pid}",
            kind,
            start,
            event.ts,
            state.negotiate_start if negotiated else None,
            state.negotiate_end if negotiated else None,
            state.ticks,
            state.phases,
            dtype,
            shape,
            size,
        )

    def _name(self, event: TimelineEvent) -> None:
        if event.name == "process_name" and event.args is not None:
            if (start := event.args.start_time_since_epoch_in_micros) is not None:
                self.start_time_since_epoch = start if 0 <= start <= LATEST else None
            else:
                self._names[event.pid] = event.args.name


def read(path: str | Path) -> Recording:
    """A timeline written by Horovod, to be iterated over; nothing of it is read yet.

    Args:
        path: a file that HOROVOD_TIMELINE named, as it is or compressed with gzip; it may be cut off anywhere, damaged
            or still being written.
    Raises:
        DataNotFoundError: there is no such file.
        DataError: it is a directory or may not be read.
    Source: Horovod 0.28.1, horovod/common/timeline.cc; the Trace Event Format of Chrome.
    """
    path = Path(path)
    try:
        with files.opened(path) as file:
            file.read(1)  # some file systems open what they cannot read
            return Recording(path)
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"no timeline at {str(path)!r}; expected the file that HOROVOD_TIMELINE (or hvdkit launch --timeline) "
            "named: only rank 0 writes it, on its own host."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read the timeline {str(path)!r} ({error}); give the path of a readable file."
        ) from error


def _pieces(content: Callable[[int], bytes], dropped: Counter[str]) -> Iterator[list[TimelineEvent]]:
    """All events of a file, a piece at a time; what is unreadable is counted in ``dropped``.

    Args:
        content: gives at most so many bytes that come next.
    """
    rest, gap = b"", 0
    while gap <= LONGEST_GAP:
        try:
            read = content(PIECE)
        except (EOFError, OSError, zlib.error):
            dropped["compressed data damaged or cut off"] += 1
            read = b""
        if not read:
            events = _decode(rest.rstrip(b" \t\r\n,]"))
            yield _decode_singly(rest, dropped, is_end=True) if events is None else events
            return
        events, rest = _decode_most(rest + read, dropped)
        gap = 0 if events else gap + len(read)
        yield events
    dropped[f"no event in {LONGEST_GAP >> 20} MiB, not read further"] += 1


def _decode_most(piece: bytes, dropped: Counter[str]) -> tuple[list[TimelineEvent], bytes]:
    """The events of a piece up to one that may be incomplete, and what is left of the piece."""
    cuts = list(islice(_boundaries(piece), TRIES))
    for cut in cuts:
        events = _decode(piece[:cut])
        if events is not None:
            return events, piece[cut:]
    last = cuts[0] if cuts else max(0, len(piece) - LONGEST_EVENT)
    return _decode_singly(piece[:last], dropped) if last else [], piece[last:]


def _boundaries(piece: bytes) -> Iterator[int]:
    """Where the last event may start, which may be incomplete, then the one before; a name may look like that too."""
    cut = len(piece)
    while (cut := max(piece.rfind(b"},{", 0, cut), piece.rfind(b"},\n{", 0, cut))) >= 0:
        yield cut + 2
    for match in reversed(list(_BETWEEN.finditer(piece, max(0, len(piece) - LONGEST_EVENT)))):
        yield match.end()


def _decode(piece: bytes) -> list[TimelineEvent] | None:
    """All events of a piece; None if something in it is not one."""
    try:
        return _EVENTS.decode(b"[" + piece.strip(b" \t\r\n,[") + b"]")
    except _UNREADABLE:
        return None


def _decode_singly(piece: bytes, dropped: Counter[str], *, is_end: bool = False) -> list[TimelineEvent]:
    """What can be decoded of a damaged piece, event by event; ``is_end``: nothing follows it in the file."""
    events: list[TimelineEvent] = []
    texts = [text for text in _BETWEEN.split(piece) if text.strip(b" \t\r\n,[]")]
    for number, text in enumerate(texts, start=1):
        event = _decode_one(text.strip(b" \t\r\n,[]\0"))  # zeros: a hole in the file
        if event is not None:
            events.append(event)
        else:
            dropped["cut off at the end" if is_end and number == len(texts) else "unreadable"] += 1
    return events


def _decode_one(text: bytes) -> TimelineEvent | None:
    """The event, also where its text is not UTF-8; None if it is none."""
    for candidate in (text, text.decode("utf-8", "replace").encode()):
        try:
            event = _EVENT.decode(candidate)
        except _UNREADABLE:
            continue
        return event if event.ph else None
    return None
