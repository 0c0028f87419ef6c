"""The output of all ranks as one stream of whole lines, each with the tag of its rank."""

from __future__ import annotations

import os
import select
from collections import defaultdict
from collections.abc import Callable

MAX_LINE_BYTES = 1 << 20
"""A longer line is written in pieces, so that output without line ends cannot fill the memory."""

_PATIENCE_S = 0.2


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


class TaggedOutput:
    """Writes the lines of several sources to file descriptors, never two sources within one line.

    Args:
        tagged: put ``[source] `` before each line.
        give_up: asked while a reader takes nothing (a pager at its first page): True to wait no longer for it.
    """

    def __init__(self, tagged: bool, give_up: Callable[[], bool]) -> None:
        self._tagged = tagged
        self._give_up = give_up
        self._buffers: dict[tuple[str, int], LineBuffer] = defaultdict(LineBuffer)
        self._unfinished: tuple[str, int] | None = None  # who wrote the last line, if it ended in \r
        self._returned: set[tuple[str, int]] = set()  # whose last line ended in \r

    def feed(self, source: str, fd: int, data: bytes) -> None:
        """Write the lines that ``data``, the next bytes of a source, completes.

        Raises:
            BrokenPipeError: nobody reads ``fd`` any more, or ``give_up`` said so.
        """
        self._write_lines(source, fd, self._buffers[source, fd].feed(data))

    def close(self, source: str, fd: int) -> None:
        """Write what is left of a source that has ended.

        Raises:
            BrokenPipeError: nobody reads ``fd`` any more, or ``give_up`` said so.
        """
        self._write_lines(source, fd, self._buffers[source, fd].close())

    def say(self, fd: int, line: str) -> None:
        """Write a line of this program itself, without a tag.

        Raises:
            BrokenPipeError: nobody reads ``fd`` any more, or ``give_up`` said so.
        """
        self._finish_line()
        self._write(fd, f"{line}\n".encode())

    def _finish_line(self) -> None:
        if self._unfinished is not None:
            self._write(self._unfinished[1], b"\n")
            self._unfinished = None

    def _write_lines(self, source: str, fd: int, lines: list[bytes]) -> None:
        self._write(fd, b"".join(self._render(source, fd, line) for line in lines))

    def _render(self, source: str, fd: int, line: bytes) -> bytes:
        stream = (source, fd)
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
        return f"[{source}] ".encode() + line if self._tagged else line

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            _, writable, _ = select.select([], [fd], [], _PATIENCE_S)
            if writable:
                # What select promises is room for this much without blocking.
                view = view[os.write(fd, view[: select.PIPE_BUF]) :]
            elif self._give_up():
                raise BrokenPipeError
