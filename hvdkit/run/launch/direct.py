"""Runs a launcher by itself: elastic jobs, and ranks on other hosts.

Elastic ranks are watched by horovodrun, which must replace those that fail; ranks on other hosts cannot reach the
socket of ``supervise``. Their output comes as the launcher passes it on, and it is the launcher that ends them. When
such a job fails, the hosts that were lost, or that nothing knows, are named.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, cast

from hvdkit.common.signals import handled
from hvdkit.run.launch.outcome import KNOCK_ON_MARKS, JobEnd
from hvdkit.run.launch.peer import ENDING
from hvdkit.run.launch.reach import Reach
from hvdkit.run.launch.start import start

_LOST_DAEMON = (b"lost communication with a remote daemon", b"A daemon failed to report back")
"""What Open MPI's mpirun says of a host that it lost, before it ends with status 0 (seen with 5.0)."""
_LOST_PEER = (*_LOST_DAEMON, *KNOCK_ON_MARKS)
_DRAIN_S = 2.0
"""Seconds for what the launcher's own children still write when it has ended."""


def run(argv: list[str], environment: Mapping[str, str], hosts: Sequence[str] = ()) -> JobEnd:
    """Run a launcher to its end, passing signals on, a second one as SIGKILL; how it ended.

    Args:
        argv: the launcher, its options and the command.
        environment: all its variables.
        hosts: where the ranks run, as far as it is known; those that are lost are named on standard error.
    Returns:
        The launcher's status; 1 where it gives 0 although it lost a host.
    Raises:
        LaunchError: it cannot be started.
    """
    reach = Reach(hosts)
    process: subprocess.Popen[bytes] | None = None
    ended_by: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        ended_by.append(number)
        if process is None:
            return  # it is told as soon as it runs
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.killpg(process.pid, signal.SIGKILL if len(ended_by) > 1 else number)

    with handled(ENDING, pass_on):
        process = start(argv, environment)
        if ended_by:
            os.killpg(process.pid, ended_by[0])
        pipes = (cast(IO[bytes], process.stdout), cast(IO[bytes], process.stderr))
        copies = [_Copy(stream, fd, reach.suspect) for fd, stream in enumerate(pipes, start=1)]
        status = process.wait()
    for copy in copies:
        copy.join(_DRAIN_S)
        while copy.is_alive() and copy.writing:  # whoever reads takes its time
            copy.join(_DRAIN_S)
    if ended_by:
        return JobEnd(128 + ended_by[0], interrupted=True)
    if any(copy.lost_daemon for copy in copies):
        status = status or 1
    if status and (sentence := reach.lost() or reach.unknown()) is not None:
        begin = "\n" if copies[1].within_line else ""
        sys.stderr.write(f"{begin}hvdkit launch: {sentence}\n")
    return JobEnd(status if status >= 0 else 128 - status, interrupted=False)


class _Copy(threading.Thread):
    """Passes a stream of the launcher on as it comes, and looks in it for what says that a host was lost."""

    def __init__(self, stream: IO[bytes], to: int, on_lost_peer: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self._to = to
        self._on_lost_peer = on_lost_peer
        self.lost_daemon = False
        self.within_line = False
        self.writing = False
        self.start()

    def run(self) -> None:
        before = b""
        with self._stream, contextlib.suppress(OSError):  # nobody reads it any more: the launcher is to notice, too
            while data := os.read(self._stream.fileno(), 1 << 16):
                seen = before + data
                self.lost_daemon |= any(mark in seen for mark in _LOST_DAEMON)
                if any(mark in seen for mark in _LOST_PEER):
                    self._on_lost_peer()
                before = seen[-max(map(len, _LOST_PEER)) :]
                self.within_line = not data.endswith(b"\n")
                self.writing = True
                while data:
                    data = data[os.write(self._to, data) :]
                self.writing = False
