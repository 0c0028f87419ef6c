"""What wakes the loop of ``supervise`` beside output: signals, and ranks that connect."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from hvdkit.common.signals import handled

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a user or a batch system ends a job with."""


def listener() -> socket.socket:
    """A socket in the kernel's abstract namespace: no file to protect or to remove; peers are known by their uid."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0hvdkit-launch-{os.getpid()}-{secrets.token_hex(8)}")
    server.listen(socket.SOMAXCONN)
    server.setblocking(False)
    return server


@dataclass
class Signals:
    """Signals as events of the one loop that sees everything else."""

    wakeup: socket.socket
    received: deque[int] = field(default_factory=deque)
    interrupted: bool = False

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler; what follows from the signal is done by the loop."""
        self.received.append(number)
        self.interrupted = self.interrupted or number in ENDING


@contextlib.contextmanager
def watched_signals() -> Iterator[Signals]:
    """Collect the signals that end a job or say that a child has ended."""
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.setblocking(False)
        signals = Signals(receiver)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            with handled((signal.SIGCHLD, *ENDING), signals.note):
                yield signals
        finally:
            signal.set_wakeup_fd(previous_fd)
