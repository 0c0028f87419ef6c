"""The hosts of a job, asked from here: which answer, which no longer do, which nobody knows."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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
        return _sentence(
            [host for host in answered if host not in answer_now],
            "host {} answered when the job began and no longer does: the network between, or the host itself, failed, "
            "and the ranks there are lost.",
            "hosts {} answered when the job began and no longer do: the network between, or these hosts, failed, and "
            "the ranks there are lost.",
        )

    def unreached(self, said: bytes) -> str | None:
        """Why no rank ran anywhere, as far as the launcher or the hosts tell; ``said``: by the launcher."""
        if (missing := _MISSING.search(said)) is not None:
            return (
                f"{missing[1].decode(errors='replace')} does not exist on another host: this environment and this "
                "directory must lie at the same path on every host; install it there, or on a file system that all "
                "share."
            )
        answered = self._answered.result()
        why = "no name server has an address; correct --hosts or the host file, unless ssh has such an alias."
        return (
            _sentence(
                [host for host in self._hosts if host not in answered and _addresses(host) == []],
                f"host {{}} is unknown: {why}",
                f"hosts {{}} are unknown: {why}",
            )
            or self.silent()
        )

    def look_for_silent(self) -> Future[str | None]:
        """``silent``, in the background."""
        return self._asking.submit(self.silent)

    def silent(self) -> str | None:
        """A sentence that names the hosts that do not answer now, None without any."""
        answering = _answering({host: host for host in self._hosts})
        why = (
            f"not answer on port {_PORT}, that of ssh: a firewall is between, or the address is wrong; 'ssh HOST true' "
            "must work from here."
        )
        silent = [host for host in self._hosts if host not in answering]
        return _sentence(silent, f"host {{}} does {why}", f"hosts {{}} do {why}")


def _sentence(hosts: Sequence[str], of_one: str, of_several: str) -> str | None:
    """The sentence with the names of the hosts, None where there are none."""
    if len(hosts) > 1:
        return of_several.format(f"{', '.join(hosts[:-1])} and {hosts[-1]}")
    return of_one.format(hosts[0]) if hosts else None


def _answering(addresses: dict[str, str], silent_before: Collection[str] = ()) -> dict[str, str]:
    """The hosts of these that answer, with the address of each: names cannot be looked up without a network."""
    if not addresses:
        return {}
    waits = [_AGAIN_S if host in silent_before else _WAIT_S for host in addresses]
    with ThreadPoolExecutor(min(_AT_A_TIME, len(addresses))) as pool:
        found = dict(zip(addresses, pool.map(_ask, addresses.values(), waits), strict=True))
    return {host: address for host, address in found.items() if address is not None}


def _ask(host: str, wait_s: float) -> str | None:
    """The address of a host that answers on the port of ssh, or refuses, which is an answer as well."""
    for address in (_addresses(host) or [])[:1]:
        with contextlib.suppress(OSError):
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((address, _PORT), wait_s).close()
            return address
    return None


def _addresses(host: str) -> list[str] | None:
    """Its addresses, none where there are none; None where no name server answers in time.

    The resolver itself may take minutes, and cannot be interrupted.
    """
    found: Future[list[str]] = Future()

    def look_up() -> None:
        try:
            places = socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)
            found.set_result([str(place[0]) for *_, place in places])
        except (OSError, UnicodeError):  # a label that is empty or too long
            found.set_result([])

    threading.Thread(target=look_up, daemon=True).start()
    try:
        return found.result(_LOOK_UP_S)
    except TimeoutError:
        return None
