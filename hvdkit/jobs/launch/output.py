"""What is seen of a job: its ranks' output as one stream of whole lines, the launcher's own, and last words.

The errors of several ranks are so sorted that the cause is read last and its consequences take one line each.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

STDOUT, STDERR = 1, 2
START_UP = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR|"
    rb"I0000 00:00:[\d.]+ +\d+ \w+\.cc:\d+\] |"
    rb"To enable the following instructions: .* rebuild TensorFlow"
)
"""What TensorFlow's C++ writes on every rank before its log is set up, whatever TF_CPP_MIN_LOG_LEVEL is."""
_PATIENCE_S = 0.2
_Stream = tuple[str, int]
"""Who writes, and to which descriptor."""
Write = Callable[[int, bytes], None]
"""Takes what is for a descriptor."""
HOLD_S = 4.0
"""Seconds that a traceback is held back to see whether the rank ends by it; one that goes on is shown then.

A rank that ends takes leave of the watch over allreduces first: two seconds, more on a busy host."""
KNOCK_ON_HOLD_S = 10.0
"""The same when a rank says that Horovod lost a peer: the job most likely ends, which takes TensorFlow seconds."""
REPEAT_S = 15.0
"""A traceback that was shown longer than this before the end of its rank is not taken for the cause of that end."""

LOST_PEER = (b"HorovodInternalError", b"Horovod has been shut down. This was caused by")
"""Words of Horovod's own in a rank whose peer is gone; a program may quote them."""

MAX_LINE_BYTES = 1 << 20
"""A longer line is passed on in pieces, so that output without line ends cannot fill the memory."""

_KNOCK_ON = (b"HorovodInternalError", b"RootError")
"""Exceptions of a rank whose peer is gone, or that stops because the root failed."""
_SAME = 20
_HEADER = b"Traceback (most recent call last):"
_WHILE_HANDLING = re.compile(
    rb"\n\nDuring handling of the above exception, another exception occurred:\n\n(?=Traceback )"
)
_RAISED_FROM = re.compile(
    rb"\n\nThe above exception was the direct cause of the following exception:\n\n(?=Traceback )"
)
_CRASH = b"Fatal Python error:"  # of faulthandler, at a segmentation fault
_EXCEPTION = re.compile(rb"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::|\s*$)")


class LineBuffer:
    """Cuts one stream into lines. Bytes stay bytes: what a rank writes need not be text."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        r"""The lines that ``data`` completes, each with its end.

        ``\r`` ends a line, as progress bars write it. When ``\n`` follows only later, it comes as a line of its own.
        """
        lines = []
        for piece in data.splitlines(keepends=True):
            self._pending += piece
            if piece.endswith((b"\n", b"\r")):
                lines.append(self._take())
            elif len(self._pending) >= MAX_LINE_BYTES:
                lines.append(self._take() + b"\n")
        return lines

    def close(self) -> list[bytes]:
        """The last line when it has no end, given the end that it lacks."""
        return [self._take() + b"\n"] if self._pending else []

    def _take(self) -> bytes:
        line = bytes(self._pending)
        self._pending.clear()
        return line


class ErrorStream:
    """Standard error of one rank. It streams, but from the first line of a traceback on it is held back.

    The end of a traceback is not looked for (chained and nested ones, messages of many lines): what follows it within
    ``HOLD_S``, or until the rank ends, is held with it.
    """

    def __init__(self) -> None:
        self._buffer = LineBuffer()
        self._held: list[bytes] = []
        self._held_since = 0.0
        self._released = b""
        self._lost_a_peer = False

    @property
    def holding(self) -> bool:
        """Whether a traceback is held back."""
        return bool(self._held)

    @property
    def held_s(self) -> float:
        """Seconds for which the traceback has been held."""
        return time.monotonic() - self._held_since

    @property
    def last_report(self) -> bytes:
        """The traceback that is held, or the one that was released and is the last that this rank wrote."""
        return b"".join(self._held) or self._released

    @property
    def knock_on(self) -> bool:
        """Whether it ends because Horovod lost a peer: by its last traceback, or by any word of it if there is none."""
        return _ends_by_a_peer(self.last_report) if self.last_report else self._lost_a_peer

    def feed(self, data: bytes) -> list[bytes]:
        """The lines to show now of ``data``, the next bytes of the stream."""
        return self._sort(self._buffer.feed(data))

    def close(self) -> list[bytes]:
        """The lines to show at the end of the stream; what is held stays held."""
        if self.held_s > REPEAT_S:
            self._released = b""
        return self._sort(self._buffer.close())

    def release(self) -> bytes:
        """What is held, to be shown now; nothing is held afterwards."""
        if self._held:
            self._released = b"".join(self._held)
            self._held.clear()
            return self._released
        return b""

    def _sort(self, lines: list[bytes]) -> list[bytes]:
        shown = []
        for line in lines:
            self._lost_a_peer = self._lost_a_peer or any(words in line for words in LOST_PEER)
            if self._held or _HEADER in line or _CRASH in line:
                self._held_since = self._held_since if self._held else time.monotonic()
                self._held.append(line)
            else:
                shown.append(line)
                self._released = b""
        return shown


class JobOutput:
    """Everything that a job writes goes through here, as long as somebody reads it; never two sources within one line.

    Args:
        launcher: its name, for the tag of what it writes itself.
        tagged: put ``[rank] `` before each line.
        verbose: show START_UP, too.
        write: takes what is shown; None for this process's own descriptors.
    Attributes:
        give_up: asked while a reader takes nothing (a pager at its first page): True to wait no longer for it.
        on_unread: called once when nobody reads any more.
        unread: nobody reads any more; what comes is dropped.
        held: what the launcher wrote and is not to be seen yet: after a failure it only repeats at length what the last
            line of this program says, and some launchers chatter before the ranks run.
    """

    give_up: Callable[[], bool]
    on_unread: Callable[[], None]

    def __init__(self, launcher: str, *, tagged: bool, verbose: bool, write: Write | None = None) -> None:
        self.unread = False
        self.held = bytearray()
        self._launcher = launcher
        self._tagged, self._verbose = tagged, verbose
        self._write_elsewhere = write
        self._buffers: dict[_Stream, LineBuffer] = defaultdict(LineBuffer)
        self._last_writer: _Stream | None = None
        self._unfinished: _Stream | None = None  # who wrote the last line, if it ended in \r
        self._returned: set[_Stream] = set()  # whose last line ended in \r

    def show(self, source: object, fd: int, data: bytes) -> None:
        """Write the next bytes of a rank or of the launcher, whole lines at a time."""
        stream = (str(source), fd)
        self._write(fd, b"".join(self._render(stream, line) for line in self._buffers[stream].feed(data)))
        if data:
            self._last_writer = stream

    def errors(self, rank: int | None, lines: Sequence[bytes]) -> None:
        """Write lines of a rank's standard error."""
        for line in lines:
            if self._verbose or not START_UP.match(line):
                self.show(rank, STDERR, line)

    def end_of(self, source: object) -> None:
        """Write what is left of a rank or of the launcher, a last line without its end."""
        for stream, buffer in self._buffers.items():
            if stream[0] == str(source):
                self._write(stream[1], b"".join(self._render(stream, line) for line in buffer.close()))

    def release_launcher(self) -> None:
        """Write what was held of the launcher."""
        self.show(self._launcher, STDERR, bytes(self.held))
        self.held.clear()

    def launcher_at_end(self) -> None:
        """Write what was held of the launcher, down to a last line without its end."""
        self.release_launcher()
        self.end_of(self._launcher)

    def tracebacks(self, errors: Mapping[int, ErrorStream], culprit: int | None) -> None:
        """Write the tracebacks that are held back, that of the rank that failed first last."""
        for rank, text in last_words(errors, culprit, self._last_writer, self._tagged):
            self.show(rank, STDERR, text)

    def say(self, sentence: str) -> None:
        """Write a line of this program itself."""
        self._finish_line()
        self._write(STDERR, f"hvdkit launch: {sentence}\n".encode())

    def _render(self, stream: _Stream, line: bytes) -> bytes:
        if self._unfinished != stream:
            self._finish_line()
        if line == b"\n" and stream in self._returned:
            self._returned.discard(stream)
            still_open, self._unfinished = self._unfinished == stream, None
            return line if still_open else b""
        if line == b"\r":
            return b""
        if line.endswith(b"\r"):
            self._unfinished = stream
            self._returned.add(stream)
        else:
            self._unfinished = None
            self._returned.discard(stream)
        return f"[{stream[0]}] ".encode() + line if self._tagged else line

    def _finish_line(self) -> None:
        """End the line of a source that has only returned to its beginning."""
        if self._unfinished is not None:
            self._write(self._unfinished[1], b"\n")
            self._unfinished = None

    def _write(self, fd: int, data: bytes) -> None:
        if self._write_elsewhere is not None:
            self._write_elsewhere(fd, data)
            return
        view = memoryview(b"" if self.unread else data)
        with contextlib.suppress(BrokenPipeError):
            while view:
                _, writable, _ = select.select([], [fd], [], _PATIENCE_S)
                if writable:
                    # What select promises is room for this much without blocking.
                    view = view[os.write(fd, view[: select.PIPE_BUF]) :]
                elif self.give_up():
                    break
        if view:
            self.unread = True
            self.on_unread()


def last_words(
    errors: Mapping[int, ErrorStream], culprit: int | None, last_writer: tuple[str, int] | None, tagged: bool
) -> list[tuple[int, bytes]]:
    """What is left to show at the end of a job: one line for each rank that only lost a peer, then the cause.

    Args:
        errors: by rank; nothing is held in them afterwards.
        culprit: the rank that failed first, None if none did.
        last_writer: source and descriptor of what was shown last: a cause that is the last already is not repeated.
        tagged: lines are shown with the tag of their rank; without, a folded line says whose it is.
    Returns:
        Rank and text, in order.
    """
    words = []
    cause = b"" if culprit is None else errors[culprit].last_report
    repeat = culprit is not None and (errors[culprit].holding or last_writer != (str(culprit), STDERR))
    for rank, stream in errors.items():
        lost_a_peer, report = stream.knock_on, stream.release()
        if rank == culprit or not report:
            continue
        whose = "" if tagged else f"rank {rank} "
        name, text = _exceptions(_WHILE_HANDLING.split(report)[-1])[-1]
        if lost_a_peer:
            said = _message(text)
            said = said.splitlines()[0] if said.startswith(b"rank") else name  # why, in words of hvdkit
            report = f"{whose}lost its peers: ".encode() + said + b"\n"
        elif report == cause:
            report = f"{whose}failed like rank {culprit}: ".encode() + (name or b"an error") + b"\n"
        words.append((rank, report))
    if culprit is not None and cause and (repeat or words):
        words.append((culprit, cause))
    return words


def _exceptions(report: bytes) -> list[tuple[bytes, bytes]]:
    """Class, and class and message as written, of exceptions that were each raised from the one before.

    It stands in the first line after a header that is not indented: what follows is of its message, which may quote
    the traceback of another process.
    """
    found = []
    for part in _RAISED_FROM.split(report[max(report.find(_HEADER), 0) :]):
        lines = part.splitlines()[1:]
        matches = ((match, at) for at, line in enumerate(lines) if (match := _EXCEPTION.match(line)) is not None)
        match, at = next(matches, (None, 0))
        found.append((match[1], b"\n".join(lines[at:])) if match is not None else (b"", b""))
    return found


def _ends_by_a_peer(report: bytes) -> bool:
    """Whether the first cause is Horovod's own error, or one that was raised from it or to say it."""
    before = b""
    for raised in _WHILE_HANDLING.split(report):
        chain = _exceptions(raised)
        if before and before != _message(chain[0][1])[:_SAME]:
            return False  # an error of its own, and then one of Horovod's as it cleaned up
        for name, text in chain:
            of_tensorflow = text.startswith(b"tensorflow.") and any(words in text for words in LOST_PEER)
            if name in _KNOCK_ON or of_tensorflow:  # TensorFlow makes a class of its own of Horovod's error
                return True
        before = _message(chain[-1][1])[:_SAME]  # horovod.torch raises its own with the same words
    return False


def _message(text: bytes) -> bytes:
    return text.partition(b": ")[2]
