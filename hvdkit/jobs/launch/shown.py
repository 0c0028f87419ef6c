"""What is seen of a job: its ranks' output as one stream of whole lines, what its launcher writes, and last words."""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections import defaultdict
from collections.abc import Callable, Sequence

from hvdkit.jobs.launch.outcome import RankEnd
from hvdkit.jobs.launch.peer import Peer
from hvdkit.jobs.launch.tracebacks import LineBuffer, last_words

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

    def errors(self, peer: Peer, lines: Sequence[bytes]) -> None:
        """Write lines of a rank's standard error."""
        for line in lines:
            if self._verbose or not START_UP.match(line):
                self.show(peer.rank, STDERR, line)

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

    def tracebacks(self, ranks: Sequence[Peer], failure: RankEnd | None) -> None:
        """Write the tracebacks that are held back, that of the failure last."""
        errors = {peer.rank: peer.errors for peer in ranks if peer.rank is not None}
        culprit = None if failure is None else failure.rank
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
