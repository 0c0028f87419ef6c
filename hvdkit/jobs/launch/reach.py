"""Why no rank comes from the hosts of a job: those that do not answer, those that nobody knows, what they lack."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

_MISSING = re.compile(rb"(/\S+/(?:python[\d.]*|prted|orted)): (?:command )?(?:not found|No such file)")
"""What the shell of another host says where this environment is not there."""
_PORT = 22
_WAIT_S = 2.0
"""How long a host may take to answer: TCP asks at 0, 1 and 3 s."""
_LOOK_UP_S = 5.0
"""The resolver's own time for one question to one name server."""
_AT_A_TIME = 64


def unreached(hosts: Sequence[str], said: bytes) -> str | None:
    """Why no rank ran anywhere, as far as the launcher or the hosts tell; ``said``: by the launcher."""
    if (missing := _MISSING.search(said)) is not None:
        return (
            f"{missing[1].decode(errors='replace')} does not exist on another host: this environment and this "
            "directory must lie at the same path on every host; install it there, or on a file system that all share."
        )
    if unknown := [host for host in hosts if _addresses(host) == []]:
        are = "is" if len(unknown) == 1 else "are"
        why = "no name server has an address; correct --hosts or the host file, unless ssh has such an alias."
        return f"{named(unknown)} {are} unknown: {why}"
    return silent(hosts)


def silent(hosts: Sequence[str]) -> str | None:
    """A sentence that names the hosts where no ssh server answers now, None without any."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        answers = dict(zip(hosts, pool.map(_answers, hosts), strict=True))
    quiet = [host for host, answer in answers.items() if not answer]
    if not quiet:
        return None
    do = "does" if len(quiet) == 1 else "do"
    why = "a firewall is between, or the address is wrong; 'ssh HOST true' must work from here."
    return f"{named(quiet)} {do} not answer on port {_PORT}, that of ssh: {why}"


def named(hosts: Sequence[str]) -> str:
    """``host a``, or ``hosts a, b and c``."""
    return f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(hosts[:-1])} and {hosts[-1]}"


def _answers(host: str) -> bool:
    """Whether a host answers on the port of ssh; to refuse is an answer as well."""
    for address in (_addresses(host) or [])[:1]:
        with contextlib.suppress(OSError):
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((address, _PORT), _WAIT_S).close()
            return True
    return False


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
