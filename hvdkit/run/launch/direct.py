"""Runs a launcher by itself: elastic jobs, and ranks on other hosts.

Elastic ranks are watched by horovodrun, which must replace those that fail; ranks on other hosts cannot reach the
socket of ``supervise``. Their output comes as the launcher passes it on, and it is the launcher that ends them. When
such a job fails, the hosts that were lost, or that nothing knows, are named.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, cast

from hvdkit.common.signals import handled
from hvdkit.run.launch.outcome import JobEnd
from hvdkit.run.launch.peer import ENDING
from hvdkit.run.launch.start import start
from hvdkit.run.launch.tracebacks import LOST_PEER

_LOST_DAEMON = (b"lost communication with a remote daemon", b"A daemon failed to report back")
"""What Open MPI's mpirun says of a host that it lost, before it ends with status 0 (seen with 5.0)."""
_LOST_PEER = (*_LOST_DAEMON, *LOST_PEER)
_DRAIN_S = 2.0
"""Seconds for what the launcher's own children still write when it has ended."""
_PORT = 22
_WAIT_S, _AGAIN_S = 2.0, 0.5
"""How long a host may take to answer: TCP asks at 0, 1 and 3 s; and one that has just been silent for so long."""
_LOOK_UP_S = 5.0
"""The resolver's own time for one question to one name server."""
_AT_A_TIME = 64


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


class Reach:
    """Remembers which hosts answer now; who answers never, behind a firewall, is not asked again.

    Args:
        hosts: names or addresses, each once; they are asked in the background.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._asking = ThreadPoolExecutor(1)
        self._answered = self._asking.submit(lambda: _answering({host: host for host in hosts}))
        self._suspected: Future[dict[str, str]] | None = None
        self._mutex = threading.Lock()

    def suspect(self) -> None:
        """Ask all hosts, once and in the background, since a rank has lost another: ``lost`` then waits less."""
        with self._mutex:
            if self._suspected is None:
                self._suspected = self._asking.submit(lambda: _answering(self._answered.result()))

    def lost(self) -> str | None:
        """A sentence that names the hosts that answered when the job began and no longer do, None without any."""
        answered = self._answered.result()
        silent_before = () if self._suspected is None else answered.keys() - self._suspected.result()
        answer_now = _answering(answered, silent_before)
        silent = [host for host in answered if host not in answer_now]
        if not silent:
            return None
        names = silent[0] if len(silent) == 1 else f"{', '.join(silent[:-1])} and {silent[-1]}"
        who, verb, what = ("host", "does", "the host itself") if len(silent) == 1 else ("hosts", "do", "these hosts")
        return (
            f"{who} {names} answered when the job began and no longer {verb}: the network between, or {what}, failed, "
            "and the ranks there are lost."
        )

    def unknown(self) -> str | None:
        """A sentence that names the hosts whose names have no address here, None without any."""
        answered = self._answered.result()
        names = [host for host in self._hosts if host not in answered and _looked_up(host) == []]
        if not names:
            return None
        who = f"host {names[0]} is unknown" if len(names) == 1 else f"hosts {', '.join(names)} are unknown"
        return f"{who}: no name server has an address; correct --hosts or the host file, unless ssh has such an alias."


def _looked_up(host: str) -> list[Any] | None:
    """Its addresses, none where there are none; None where no name server answers in time.

    The resolver itself may take minutes, and cannot be interrupted.
    """
    found: Future[list[Any]] = Future()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError):  # a label that is empty or too long
            found.set_result([])

    threading.Thread(target=look_up, daemon=True).start()
    try:
        return found.result(_LOOK_UP_S)
    except TimeoutError:
        return None


def _answering(addresses: dict[str, str], silent_before: Collection[str] = ()) -> dict[str, str]:
    """The hosts of these that answer, with the address of each: names cannot be looked up without a network."""
    if not addresses:
        return {}
    waits = [_AGAIN_S if host in silent_before else _WAIT_S for host in addresses]
    with ThreadPoolExecutor(min(_AT_A_TIME, len(addresses))) as pool:
        found = dict(zip(addresses, pool.map(_ask, addresses.values(), waits), strict=True))
    return {host: address for host, address in found.items() if address is not None}


def _ask(host: str, wait_s: float) -> str | None:
    addresses = _looked_up(host)
    if not addresses:
        return None
    family, kind, protocol, _, place = addresses[0]
    try:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(wait_s)
            with contextlib.suppress(ConnectionRefusedError):  # an answer as well
                connection.connect(place)
    except OSError:
        return None
    return str(place[0])
