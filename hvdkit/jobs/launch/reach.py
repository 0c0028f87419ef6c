"""The hosts of a job, asked from here: which answer, which no longer do, which nobody knows."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

LOST_DAEMON = (b"lost communication with a remote daemon", b"A daemon failed to report back")
"""What Open MPI's mpirun says of a host that it lost, before it ends with status 0 (seen with 5.0)."""
_MISSING = re.compile(rb"(/\S+/(?:python[\d.]*|prted|orted)): (?:command )?(?:not found|No such file)")
"""What the shell of another host says where this environment is not there."""
_PORT = 22
_WAIT_S, _AGAIN_S = 2.0, 0.5
"""How long a host may take to answer: TCP asks at 0, 1 and 3 s; and one that has just been silent for so long."""
_LOOK_UP_S = 5.0
"""The resolver's own time for one question to one name server."""
_AT_A_TIME = 64


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

    def suspect(self) -> None:
        """Ask all hosts, once and in the background, since a rank has lost another: ``lost`` then waits less."""
        if self._suspected is None:
            self._suspected = self._asking.submit(lambda: _answering(self._answered.result()))

    @property
    def suspected(self) -> bool:
        """Whether ``suspect`` was called."""
        return self._suspected is not None

    @property
    def confirmed(self) -> bool | None:
        """Whether a host that had answered was silent when it was suspected; None while that is not known."""
        if self._suspected is None or not self._suspected.done():
            return None
        return self._suspected.result().keys() < self._answered.result().keys()

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

    def unreached(self, said: bytes) -> str | None:
        """Why no rank ran anywhere, as far as the launcher or the hosts tell; ``said``: by the launcher."""
        if (missing := _MISSING.search(said)) is not None:
            return (
                f"{missing[1].decode(errors='replace')} does not exist on another host: this environment and this "
                "directory must lie at the same path on every host; install it there, or on a file system that all "
                "share."
            )
        return self.unknown() or self.silent()

    def look_for_silent(self) -> Future[str | None]:
        """``silent``, in the background."""
        return self._asking.submit(self.silent)

    def unknown(self) -> str | None:
        """A sentence that names the hosts whose names have no address here, None without any."""
        answered = self._answered.result()
        names = [host for host in self._hosts if host not in answered and _looked_up(host) == []]
        if not names:
            return None
        who = f"host {names[0]} is unknown" if len(names) == 1 else f"hosts {', '.join(names)} are unknown"
        return f"{who}: no name server has an address; correct --hosts or the host file, unless ssh has such an alias."

    def silent(self) -> str | None:
        """A sentence that names the hosts where no ssh server answers now, None without any."""
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            answers = dict(zip(self._hosts, pool.map(_answers_ssh, self._hosts), strict=True))
        names = [host for host, answer in answers.items() if not answer]
        if not names:
            return None
        who = f"host {names[0]} does" if len(names) == 1 else f"hosts {', '.join(names)} do"
        return (
            f"{who} not answer on port {_PORT}, that of ssh: a firewall is between, or the address is wrong; 'ssh HOST "
            "true' must work from here."
        )


def _answers_ssh(host: str) -> bool:
    """Whether a host says on port 22 that it is an ssh server; also where it refuses, and may have another port."""
    try:
        with socket.create_connection((host, _PORT), _WAIT_S) as connection:
            return connection.recv(1) != b""
    except ConnectionError:
        return True
    except OSError:
        return False


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
