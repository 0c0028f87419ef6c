"""A part of a timeline as a timeline of its own: the events as they were written, with the times that they had."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hvdkit.common.files import replacing
from hvdkit.common.json_files import Document
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.read.timeline.model import TimelineEvent
from hvdkit.read.timeline.reader import UNREADABLE, decode, decode_one, open_file, pieces, read
from hvdkit.read.timeline.summary import summarize

_NEGOTIATE = "NEGOTIATE_"
_TEXTS = msgspec.json.Decoder(list[msgspec.Raw])
_Pair = tuple[TimelineEvent, bytes]


class Slice(Document, frozen=True):
    """What was cut out.

    Attributes:
        path: the file that was written.
        since, until: the window, from the beginning of the recording; the end is None for the rest of it.
        operations: how many began in it, finished or not.
        events: how many events were written.
    """

    kind = "timeline-slice"
    written_by = "hvdkit timeline slice --json"
    times = frozenset(("since", "until"))

    path: str
    since: float
    until: float | None
    operations: int
    events: int


def slice_timeline(
    source: str | Path,
    output: str | Path,
    *,
    since: float | None = None,
    until: float | None = None,
    steps: tuple[int, int] | None = None,
) -> Slice:
    """Write the operations that began in a window to a timeline of their own, as a stream.

    Operations are kept whole, from their negotiation to their end, also where they end after the window, so that
    slices that follow one another hold every operation exactly once. Events are copied as they are. Times stay
    relative to the start of the whole recording, whose time since 1970 is kept: an operation has the same time in the
    slice as in the source.

    Args:
        source: a timeline file.
        output: the file to write; compressed where the name ends in .gz.
        since, until: of the window, in seconds since the recording started; until itself is not in it.
        steps: first and last training step, from 0, both included, instead of since and until.
    Returns:
        What was written.
    Raises:
        InvalidArgumentError: an empty window, or steps together with since or until.
        DataNotFoundError, DataError: no such file, nothing in the window, no such steps, or the output not writable.
    """
    source, output = read(source).path, Path(output)
    if steps is not None and (since is not None or until is not None):
        raise InvalidArgumentError("steps and since/until are two ways to name a window; give one of them.")
    first, last = _steps(source, steps) if steps is not None else (since or 0.0, math.inf if until is None else until)
    if first < 0:
        raise InvalidArgumentError(f"since is {first:g} s; expected at least 0, the start of the recording.")
    if not first < last:
        raise InvalidArgumentError(f"the window from {first:g} s to {last:g} s is empty; give since below until.")
    window = _Window(first * 1e6, last * 1e6)
    events = 0
    with replacing(output, source) as file:
        for text in window.texts(source):
            file.write(b",\n" if events else b"[\n")
            file.write(text)
            events += 1
        if not window.operations:
            raise DataError(_nothing(source, window))
        file.write(b"]\n")
    return Slice(str(output), first, None if math.isinf(last) else last, window.operations, events)


def _nothing(source: Path, window: _Window) -> str:
    if window.latest < window.earliest:
        return f"no event of Horovod in {str(source)!r}; give a file that Horovod wrote with HOROVOD_TIMELINE."
    end = "the end" if math.isinf(window.until) else f"{window.until / 1e6:g} s"
    return (
        f"no operation began between {window.since / 1e6:g} s and {end} of {str(source)!r}, whose events lie between "
        f"{window.earliest / 1e6:g} s and {window.latest / 1e6:g} s; choose a window in it."
    )


def _steps(source: Path, steps: tuple[int, int]) -> tuple[float, float]:
    """Since and until of training steps, in seconds."""
    first, last = steps
    found = summarize(source).steps
    count = 0 if found is None else found.count
    if found is None or not 0 <= first <= last < count:
        known = f"which has the steps 0..{count - 1}" if count else "in which no repeating steps were found"
        raise DataError(f"no steps {first}..{last} in {str(source)!r}, {known}; choose others, or use since and until.")
    begins = found.begins / 1e6
    return float(begins[first]), float(begins[last + 1]) if last + 1 < count else math.inf


class _Tensor:
    """Where the events of one pid stand: whether its operation is kept, and how deep we are in it."""

    __slots__ = ("depth", "keep", "kind", "metadata", "negotiating")

    def __init__(self) -> None:
        self.keep = False
        self.depth = 0
        self.kind: str | None = None
        self.negotiating = False
        self.metadata: list[bytes] = []


class _Window:
    def __init__(self, since: float, until: float) -> None:
        self.since, self.until = since, until
        self.operations = 0
        self.earliest, self.latest = math.inf, -math.inf
        self._tensors: dict[int, _Tensor] = {}

    def texts(self, source: Path) -> Iterator[bytes]:
        """The events in the window, each tensor's names before the first of them."""
        for event, text in raw_events(source):
            tensor = self._tensors.get(event.pid)
            if tensor is None:
                tensor = self._tensors[event.pid] = _Tensor()
            if event.ph == "M":
                if event.args is not None and event.args.start_time_since_epoch_in_micros is not None:
                    yield text
                else:
                    tensor.metadata.append(text)
            elif self._kept(event, tensor):
                yield from tensor.metadata
                tensor.metadata.clear()
                yield text

    def _kept(self, event: TimelineEvent, tensor: _Tensor) -> bool:
        inside = self.since <= event.ts < self.until
        self.earliest, self.latest = min(self.earliest, event.ts), max(self.latest, event.ts)
        if event.ph == "B":
            self._begin(event.name, inside, tensor)
        elif not tensor.depth:
            return inside
        elif event.ph == "E":
            tensor.depth -= 1
            if not tensor.depth and not tensor.negotiating:
                tensor.kind = None
        return tensor.keep

    def _begin(self, name: str, inside: bool, tensor: _Tensor) -> None:
        """Decide about an operation where it starts; what an earlier one left open has lost its end."""
        if name.startswith(_NEGOTIATE):
            self._start(inside, tensor)
            tensor.kind, tensor.negotiating, tensor.depth = name[len(_NEGOTIATE) :], True, 1
        elif tensor.depth and not tensor.negotiating:
            tensor.depth += 1
        else:
            if tensor.kind != name:
                self._start(inside, tensor)
            tensor.kind, tensor.negotiating, tensor.depth = None, False, 1

    def _start(self, inside: bool, tensor: _Tensor) -> None:
        tensor.keep = inside
        self.operations += inside


def raw_events(path: Path) -> Iterator[_Pair]:
    """Every event that can be read, in the order of the file, and its JSON text without the commas around it.

    Args:
        path: a timeline, as it is or compressed with gzip; what is damaged is left out, as by ``read``.
    """
    with open_file(path) as file:
        for pairs in pieces(file, Counter(), _decode_pairs, _decode_pair):
            yield from pairs


def _decode_pairs(piece: bytes) -> list[_Pair] | None:
    events, text = decode(piece), b"[" + piece.strip(b" \t\r\n,[") + b"]"
    try:
        text.decode()
        return None if events is None else list(zip(events, map(bytes, _TEXTS.decode(text)), strict=True))
    except UNREADABLE:
        return None


def _decode_pair(text: bytes) -> _Pair | None:
    event = decode_one(text)
    return None if event is None else (event, text.decode("utf-8", "replace").encode())
