"""The clocks of several machines, compared with that of rank 0.

Within one machine, network namespaces and containers included, CLOCK_MONOTONIC is one clock, and nothing is compared.
Ranks on other machines ask rank 0 for its time again and again: an answer that took d seconds was given at some moment
within them, so that taking it for the middle is wrong by at most d/2. The quickest answer counts, before and after the
measurement; between the two the difference of the clocks is taken to change evenly.

Source: Mills, Internet time synchronization: the Network Time Protocol, IEEE Transactions on Communications 39 (1991),
    section on the clock filter; Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989).
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import LauncherError

QUESTIONS = 40
_WAIT_S = 60.0
_HELLO_S = 1.0
_TIME = struct.Struct("!d")
_HELLO_BYTES = 16


def machine() -> str:
    """What names the clock of this process: equal on two ranks, they read the same clock."""
    texts = []
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets"):
        with contextlib.suppress(OSError):  # not Linux, or a kernel without time namespaces
            texts.append(" ".join(Path(file).read_text(encoding="utf-8").split()))
    return "/".join(texts) or socket.gethostname()


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a clock is from that of rank 0.

    Attributes:
        at: when, in seconds of this rank's clock.
        offset: seconds to add to this rank's clock for that of rank 0.
        bound: seconds by which ``offset`` may be wrong.
    """

    at: float
    offset: float
    bound: float


def best(exchanges: Sequence[tuple[float, float, float]]) -> Reading:
    """The reading of the quickest answer.

    Args:
        exchanges: (asked, answer, received): own clock, rank 0's clock, own clock; at least one.
    """
    asked, answer, received = min(exchanges, key=lambda times: times[2] - times[0])
    middle = (asked + received) / 2
    return Reading(middle, answer - middle, (received - asked) / 2)


def offset_at(at: float, readings: Sequence[Reading]) -> float:
    """Seconds to add to a rank's clock at a time of it: between two readings by a straight line.

    Args:
        at: time of that clock.
        readings: before and after; one of them where the job was ended; none for a rank with the clock of rank 0.
    """
    if not readings:
        return 0.0
    first, last = readings[0], readings[-1]
    if last.at <= first.at:
        return first.offset
    share = (at - first.at) / (last.at - first.at)
    return first.offset + share * (last.offset - first.offset)


class Server:
    """Rank 0, as those on other machines ask it.

    Attributes:
        port: on all addresses of this host.
        key: what a rank has to say first.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._visitors: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self.key = secrets.token_hex(_HELLO_BYTES // 2)

    def admit(self, count: int) -> None:
        """Wait until so many ranks have come.

        Raises:
            LauncherError: they do not come.
        """
        deadline = time.monotonic() + _WAIT_S
        while len(self._visitors) < count:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                visitor, _ = self._listener.accept()
            except TimeoutError:
                raise LauncherError(
                    f"{count - len(self._visitors)} ranks of other hosts did not reach rank 0 within {_WAIT_S:g} s to "
                    "compare clocks; look for their errors, and check that the hosts reach each other over TCP."
                ) from None
            if not self._knows_key(visitor):
                visitor.close()
                continue
            visitor.settimeout(_WAIT_S)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._visitors.append(visitor)

    def _knows_key(self, visitor: socket.socket) -> bool:
        """Whether it says the key, and soon: whatever else connects is not to keep the ranks out."""
        try:
            said = _received(visitor, _HELLO_BYTES, until=time.monotonic() + _HELLO_S)
        except (OSError, LauncherError):
            return False
        return hmac.compare_digest(said, self.key.encode())

    def answer(self) -> None:
        """Answer the questions of one reading of every rank, one rank after the other."""
        for visitor in self._visitors:
            for _ in range(QUESTIONS):
                _received(visitor, 1)
                visitor.sendall(_TIME.pack(time.monotonic()))

    def close(self) -> None:
        """Part from all of them."""
        for one in (*self._visitors, self._listener):
            one.close()


class Visitor:
    """A rank on another machine than rank 0.

    Args:
        host: name of the host of rank 0.
        port, key: of its ``Server``.
    Raises:
        LauncherError: rank 0 cannot be reached.
    """

    def __init__(self, host: str, port: int, key: str, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        try:
            self._connection = socket.create_connection((host, port), timeout=_WAIT_S)
        except OSError as error:
            raise LauncherError(
                f"Rank 0 on {host} cannot be reached over TCP (port {port}) to compare clocks: {error}; check that the "
                "hosts reach each other by name."
            ) from error
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(key.encode())

    def read(self) -> Reading:
        """Compare the clocks now."""
        exchanges = []
        for _ in range(QUESTIONS):
            asked = self._now()
            self._connection.sendall(b"?")
            (answer,) = _TIME.unpack(_received(self._connection, _TIME.size))
            exchanges.append((asked, answer, self._now()))
        return best(exchanges)

    def close(self) -> None:
        """Part from rank 0."""
        self._connection.close()


def _received(connection: socket.socket, count: int, until: float | None = None) -> bytes:
    data = b""
    while len(data) < count:
        if until is not None:
            connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(count - len(data))
        if not more:
            raise LauncherError("A rank left while the clocks of the hosts were compared; look for its error.")
        data += more
    return data
