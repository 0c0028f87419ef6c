"""Ranks that know only their number meet over TCP, and learn where all the others are.

Rank 0 listens on one of a few ports that follow from the job's key; the others try the same ports on its host until one
answers with that key, so that two jobs on a host never mix. Everyone says its host; when all are there, rank 0 answers
with all hosts and with what it wants to tell.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from hvdkit.errors import LauncherError
from hvdkit.steps.ranks import name_ranks

_CANDIDATES = 24
_PORTS = range(20000, 32768)  # registered ports; above them systems choose ports for outgoing connections
_CONNECT_S = 2.0
_PAUSE_S = 0.1
_LINE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Meeting:
    """What each rank knows after it.

    Attributes:
        hosts: name of the host of each rank, by rank.
        address: of rank 0's host, as the other ranks reach it.
        own_address: of this rank, as rank 0 sees it.
        told: what rank 0 told, JSON values.
    """

    hosts: tuple[str, ...]
    address: str
    own_address: str
    told: dict[str, Any]

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """(local_rank, local_size, cross_rank, cross_size) of a rank.

        Local ranks are in the order of ranks, hosts in the order of their first rank.
        """
        here = [one for one, host in enumerate(self.hosts) if host == self.hosts[rank]]
        local_rank = here.index(rank)
        across = [host for host in dict.fromkeys(self.hosts) if self.hosts.count(host) > local_rank]
        return local_rank, len(here), across.index(self.hosts[rank]), len(across)


def meet(
    rank: int,
    size: int,
    root_host: str,
    key: str,
    tell: Callable[[str, Sequence[str]], dict[str, Any]],
    *,
    host: str | None = None,
    timeout: float = 60.0,
) -> Meeting:
    """Meet all ranks of a job; a collective.

    Args:
        rank, size: of this process, by its launcher.
        root_host: name or address of the host of rank 0, as the others reach it.
        key: the same on all ranks, of this job alone.
        tell: on rank 0, from its address and all hosts: what every rank shall know.
        host: this rank's; default: its host name.
        timeout: seconds until all must be there.
    Raises:
        LauncherError: rank 0 was not found, or ranks did not come, in time.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    deadline = time.monotonic() + timeout
    host = socket.gethostname() if host is None else host
    if rank == 0:
        return _receive(size, root_host, digest, tell, host, deadline, timeout)
    return _visit(rank, root_host, digest, host, deadline, timeout)


def ports(digest: str) -> list[int]:
    """The ports on which rank 0 of a job may listen, in the order in which it tries them."""
    return random.Random(digest).sample(_PORTS, _CANDIDATES)  # noqa: S311


def _receive(
    size: int,
    root_host: str,
    digest: str,
    tell: Callable[..., dict[str, Any]],
    host: str,
    deadline: float,
    timeout: float,
) -> Meeting:
    hosts: dict[int, str] = {0: host}
    visitors: dict[int, socket.socket] = {}
    own = root_host
    with _listener(digest) as listener:
        while len(hosts) < size:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                visitor, _ = listener.accept()
                visitor.settimeout(_CONNECT_S)
                said = _read_line(visitor.makefile("rb"))
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                missing = name_ranks(sorted(set(range(size)) - hosts.keys()))
                raise LauncherError(
                    f"{missing} did not come to rank 0 within {timeout:g} s; look for their errors, and check that "
                    "their hosts reach this one."
                ) from None
            except (OSError, ValueError):
                continue
            if said.get("key") != digest or said.get("rank") not in range(1, size):
                visitor.close()
                continue
            visitor.sendall(json.dumps({"key": digest}).encode() + b"\n")
            own = visitor.getsockname()[0]
            hosts[said["rank"]] = str(said["host"])
            visitors[said["rank"]] = visitor
        in_order = tuple(hosts[rank] for rank in range(size))
        told = tell(own, in_order)
        for visitor in visitors.values():
            answer = {"hosts": in_order, "address": own, "told": told, "you": visitor.getpeername()[0]}
            visitor.sendall(json.dumps(answer).encode() + b"\n")
            visitor.close()
    return Meeting(in_order, own, own, told)


def _listener(digest: str) -> socket.socket:
    for port in ports(digest):
        try:
            return socket.create_server(("", port), backlog=1024)
        except OSError:
            continue
    raise LauncherError(f"rank 0 found none of {_CANDIDATES} ports free to meet the other ranks on.")


def _visit(rank: int, root_host: str, digest: str, host: str, deadline: float, timeout: float) -> Meeting:
    hello = json.dumps({"key": digest, "rank": rank, "host": host}).encode() + b"\n"
    reason = "no connection"
    while time.monotonic() < deadline:
        for port in ports(digest):
            try:
                with (
                    socket.create_connection((root_host, port), timeout=_CONNECT_S) as connection,
                    connection.makefile("rb") as stream,
                ):
                    connection.sendall(hello)
                    if _read_line(stream).get("key") != digest:
                        continue
                    connection.settimeout(max(0.01, deadline - time.monotonic()))
                    answer = _read_line(stream)
                    return Meeting(tuple(answer["hosts"]), answer["address"], answer["you"], answer["told"])
            except (OSError, ValueError) as error:
                reason = str(error) or reason
        time.sleep(_PAUSE_S)
    raise LauncherError(
        f"rank {rank} did not find rank 0 on {root_host} within {timeout:g} s ({reason}); look for the error of rank "
        "0, and check that this host reaches it."
    )


def _read_line(stream: BinaryIO) -> Any:
    line = stream.readline(_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("the connection ended within a line")
    return json.loads(line)
