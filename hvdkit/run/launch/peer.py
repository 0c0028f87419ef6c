"""A rank as ``supervise`` knows it: its connection, and what it has said."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from hvdkit.run.launch import rank as wire
from hvdkit.run.launch.outcome import RankEnd
from hvdkit.run.launch.stall import StallReports
from hvdkit.run.launch.tracebacks import ErrorStream

RECEIVE_BYTES = 1 << 18
"""The most that is read at once."""


@dataclass
class Peer:
    """The process beside one rank, see ``rank``.

    Attributes:
        connection: to it; not blocking.
        pid: its process id.
        rank: which rank it is, None until it has said so.
        received: the beginning of a frame whose rest has not come yet.
        errors: what the rank writes to standard error.
        reports: Horovod's stall reports in it; None where nobody asked for them.
        in_init: it is inside Horovod's ``init``; None until then, and where nobody asked.
        stacks: the Python stacks that it handed in.
        end: how the rank ended, None until then.
    """

    connection: socket.socket
    pid: int
    rank: int | None = None
    received: bytearray = field(default_factory=bytearray)
    errors: ErrorStream = field(default_factory=ErrorStream)
    reports: StallReports | None = None
    in_init: bool | None = None
    stacks: bytearray = field(default_factory=bytearray)
    end: RankEnd | None = None

    def order(self, order: bytes) -> None:
        """Tell it to stop, kill or dump."""
        with contextlib.suppress(OSError):  # it has just ended by itself
            self.connection.send(order)

    def receive(self) -> bytes:
        """What has come; nothing when the connection is at its end."""
        try:
            return self.connection.recv(RECEIVE_BYTES)
        except ConnectionError:
            return b""

    def frames(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Kind and payload of each frame that ``data`` completes."""
        self.received += data
        while len(self.received) >= wire.HEADER.size:
            kind, length = wire.HEADER.unpack_from(self.received)
            end = wire.HEADER.size + length
            if len(self.received) < end:
                return
            payload = bytes(self.received[wire.HEADER.size : end])
            del self.received[:end]
            yield kind, payload
