"""Ranks that know only their number meet over TCP, and learn where all the others are.

Rank 0 listens on one of a few ports that follow from the job's key; the others try the same ports on its host until one
answers who knows that key. Everyone says its host; when all are there, rank 0 answers with all hosts and with what it
wants to tell. A conversation, line by line:

    visitor   hvdkit-meeting 2 NONCE
    rank 0    NONCE CODE {}
    visitor   CODE {"rank": 1, "size": 4, "host": "n1"}
    rank 0    CODE {"hosts": [...], ...}        or, at once, CODE {"refused": "..."}

A code is HMAC-SHA256 over who speaks, how often before, and what is said, with a key that follows from the job's and
from both nonces: nothing of one conversation is worth anything in another one, or in the other direction. Rank 0 hears
all visitors at once and reads nothing but short lines from those that have not proved that they know the key; it drops
and counts what is something else.
"""

from __future__ import annotations

import errno
import hmac
import json
import random
import re
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdkit.errors import LauncherError, name_ranks
from hvdkit.steps.secret import Key

_CANDIDATES = 24
PORTS = range(20000, 32768)  # registered ports; above them systems choose ports for outgoing connections
_CONNECT_S = 2.0
_PAUSE_S = 0.1
_PROOF_S = 10.0
"""Seconds that a visitor has to prove that it knows the key."""
_STRANGERS = 256
"""Visitors that may be about to do so; the one that has taken longest makes room for the next."""
_LINE_BYTES = 1 << 10
_ANSWER_BYTES = 1 << 24
_HELLO = "hvdkit-meeting 2"
_NONCE = re.compile(r"[0-9a-f]{32}")
_ROOT, _VISITOR = "rank 0", "visitor"


@dataclass(frozen=True, slots=True)
class Meeting:
    """What each rank knows after it."""

    hosts: tuple[str, ...]  # of each rank, by rank
    address: str  # of rank 0's host, as the other ranks reach it
    own_address: str  # of this rank, as rank 0 sees it
    told: dict[str, Any]  # what rank 0 told, JSON values

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
    address: str,
    key: Key,
    tell: Callable[[str, Sequence[str]], dict[str, Any]],
    *,
    listen_on: str | None = None,
    host: str | None = None,
    timeout: float = 60.0,
) -> Meeting:
    """Meet all ranks of a job; a collective.

    Args:
        rank, size: of this process, by its launcher.
        address: name or address of the host of rank 0, as this rank reaches it.
        key: the same on all ranks, of this job alone.
        tell: on rank 0, from its address and all hosts: what every rank shall know.
        listen_on: on rank 0, the address of the interface to listen on, "" for all; default: ``address``.
        host: this rank's; default: its host name.
        timeout: seconds until all must be there.
    Raises:
        LauncherError: rank 0 was not found or refused this one, or ranks did not come, in time.
    """
    deadline = time.monotonic() + timeout
    host = socket.gethostname() if host is None else host
    if rank != 0:
        return _visit(rank, size, address, key, host, deadline, timeout)
    with _RendezvousServer(size, key, host, address if listen_on is None else listen_on) as server:
        server.let_in(deadline, timeout)
        return server.answer(tell, deadline)


def ports(key: Key) -> list[int]:
    """The ports on which rank 0 of a job may listen, in the order in which it tries them."""
    seed = hmac.digest(key.value, b"ports", "sha256").hex()
    return random.Random(seed).sample(PORTS, _CANDIDATES)  # noqa: S311


class _Conversation:
    """Codes for what is said on one connection, and their check."""

    def __init__(self, key: Key, nonces: str) -> None:
        self._key = hmac.digest(key.value, f"{_HELLO} {nonces}".encode(), "sha256")
        self._said: Counter[str] = Counter()

    def seal(self, sender: str, message: dict[str, Any]) -> bytes:
        body = json.dumps(message).encode()
        return self._code(sender, body) + b" " + body + b"\n"

    def open(self, sender: str, line: bytes) -> dict[str, Any]:
        code, _, body = line.partition(b" ")
        if not hmac.compare_digest(code, self._code(sender, body)):
            raise ValueError("what answers there has another secret")
        message: dict[str, Any] = json.loads(body)
        return message

    def _code(self, sender: str, body: bytes) -> bytes:
        number = self._said[sender]
        self._said[sender] += 1
        return hmac.digest(self._key, f"{sender} {number} ".encode() + body, "sha256").hex().encode()


@dataclass(eq=False)
class _RendezvousClient:
    connection: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)
    conversation: _Conversation | None = None
    rank: int | None = None


class _RendezvousServer:
    """Rank 0's side: lets in who knows the key, and drops everyone else."""

    def __init__(self, size: int, key: Key, host: str, listen_on: str) -> None:
        self._size = size
        self._key = key
        self._hosts = {0: host}
        self._inside: dict[int, _RendezvousClient] = {}
        self._strangers: dict[_RendezvousClient, None] = {}  # the one that came first is first
        self._dropped: Counter[str] = Counter()
        self._listener = _listen(listen_on, key)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> _RendezvousServer:
        return self

    def __exit__(self, *_: object) -> None:
        for visitor in (*self._strangers, *self._inside.values()):
            visitor.connection.close()
        self._selector.close()
        self._listener.close()

    def let_in(self, deadline: float, timeout: float) -> None:
        """Return when all ranks are inside."""
        while len(self._hosts) < self._size:
            now = time.monotonic()
            if now >= deadline:
                missing = name_ranks(sorted(set(range(self._size)) - self._hosts.keys()))
                raise LauncherError(
                    f"{missing} did not come to rank 0 within {timeout:g} s; look for their errors, and check that "
                    f"their hosts reach this one and that they have its secret ({self._key.source}){self._junk()}."
                )
            for visitor in [one for one in self._strangers if one.until <= now]:
                self._drop(visitor, "silent or slow")
            next_end = min((one.until for one in self._strangers), default=deadline)
            for found, _ in self._selector.select(min(next_end, deadline) - now):
                if found.data is None:
                    self._accept()
                elif found.data.connection.fileno() >= 0:  # not dropped since
                    self._read(found.data)

    def answer(self, tell: Callable[[str, Sequence[str]], dict[str, Any]], deadline: float) -> Meeting:
        """Tell all visitors what they came for."""
        seen_at = {visitor.connection.getsockname()[0] for visitor in self._inside.values()}
        own = max(seen_at, key=lambda address: (not address.startswith("127."), address))
        in_order = tuple(self._hosts[rank] for rank in range(self._size))
        told = tell(own, in_order)
        for rank, visitor in self._inside.items():
            try:
                you = visitor.connection.getpeername()[0]
                visitor.connection.settimeout(max(_CONNECT_S, deadline - time.monotonic()))
                answer = {"hosts": in_order, "address": own, "told": told, "you": you}
                visitor.connection.sendall(visitor.conversation.seal(_ROOT, answer))  # type: ignore[union-attr]
            except OSError as error:
                raise LauncherError(
                    f"rank {rank} left before all ranks had met ({error}); look for its error."
                ) from error
        return Meeting(in_order, own, own, told)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room("too many at once")
            return
        connection.setblocking(False)
        if len(self._strangers) >= _STRANGERS:
            self._make_room("too many at once")
        visitor = _RendezvousClient(connection, time.monotonic() + _PROOF_S)
        self._strangers[visitor] = None
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _make_room(self, why: str) -> None:
        if self._strangers:
            self._drop(next(iter(self._strangers)), why)
        else:
            time.sleep(_PAUSE_S)

    def _read(self, visitor: _RendezvousClient) -> None:
        try:
            data = visitor.connection.recv(_LINE_BYTES)
            if not data or visitor.rank is not None:
                raise ConnectionError("it has left, or does not wait for the answer")
            *lines, rest = (bytes(visitor.received) + data).split(b"\n")
            visitor.received[:] = rest
            for line in lines:
                self._receive(visitor, line)
            if len(rest) > _LINE_BYTES:
                raise ValueError("a line without an end")
        except BlockingIOError:
            return
        except ConnectionRefusedError:
            self._drop(visitor, "refused")
        except OSError:
            self._drop(visitor, "gone")
        except ValueError:
            self._drop(visitor, "without the secret" if visitor.conversation else "of something else")

    def _receive(self, visitor: _RendezvousClient, line: bytes) -> None:
        if visitor.conversation is None:
            hello, _, nonce = line.decode("ascii").rpartition(" ")
            if hello != _HELLO or not _NONCE.fullmatch(nonce):
                raise ValueError("not a hello")
            own = secrets.token_hex(16)
            visitor.conversation = _Conversation(self._key, nonce + own)
            visitor.connection.sendall(f"{own} ".encode() + visitor.conversation.seal(_ROOT, {}))
            return
        said = visitor.conversation.open(_VISITOR, line)
        refused = self._refusal(said)
        if refused is not None:
            visitor.connection.sendall(visitor.conversation.seal(_ROOT, {"refused": refused}))
            raise ConnectionRefusedError(refused)
        visitor.rank = said["rank"]
        self._hosts[visitor.rank] = str(said.get("host"))
        self._inside[visitor.rank] = visitor
        del self._strangers[visitor]

    def _refusal(self, said: dict[str, Any]) -> str | None:
        """Why a rank that knows the key cannot come in all the same."""
        rank, size = said.get("rank"), said.get("size")
        if size != self._size:
            return f"rank {rank} says that there are {size} ranks, rank 0 that there are {self._size}"
        if not isinstance(rank, int) or not 0 < rank < self._size:
            return f"rank {rank} is none of the ranks 1 to {self._size - 1} that rank 0 waits for"
        if rank in self._inside:
            return f"a rank {rank} is there already, on {self._hosts[rank]}; this one is on {said.get('host')}"
        return None

    def _drop(self, visitor: _RendezvousClient, why: str) -> None:
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        if visitor.rank is None:
            self._strangers.pop(visitor)
            self._dropped[why] += 1
        else:  # it may come again
            del self._inside[visitor.rank], self._hosts[visitor.rank]

    def _junk(self) -> str:
        count = self._dropped.total()
        if not count:
            return ""
        kinds = ", ".join(f"{number} {why}" for why, number in sorted(self._dropped.items()))
        return f"; {count} other connection{'s' if count > 1 else ''} dropped: {kinds}"


def _listen(address: str, key: Key) -> socket.socket:
    reason = ""
    for port in ports(key):
        for where in (address, ""):
            try:
                return socket.create_server((where, port), backlog=1024)
            except OSError as error:
                reason = str(error.strerror)
                if error.errno != errno.EADDRNOTAVAIL:  # else the others reach this host through an address of others
                    break
    raise LauncherError(f"rank 0 found none of {_CANDIDATES} ports free to meet the other ranks on ({reason}).")


def _visit(rank: int, size: int, address: str, key: Key, host: str, deadline: float, timeout: float) -> Meeting:
    """Find rank 0 behind one of the ports of ``key`` and say who this is; LauncherError after ``timeout`` seconds."""
    reason = "no connection"
    while time.monotonic() < deadline:
        for port in ports(key):
            until = min(deadline, time.monotonic() + _CONNECT_S)
            if until <= time.monotonic():
                break
            try:
                with socket.create_connection((address, port), timeout=until - time.monotonic()) as connection:
                    answer = _talk(connection, key, {"rank": rank, "size": size, "host": host}, until, deadline)
            except (OSError, ValueError) as error:
                reason = str(error) or reason
                continue
            if "refused" in answer:
                raise LauncherError(f"rank 0 refused this process: {answer['refused']}. Is it of another job?")
            return Meeting(tuple(answer["hosts"]), answer["address"], answer["you"], answer["told"])
        time.sleep(_PAUSE_S)
    raise LauncherError(
        f"rank {rank} did not find rank 0 on {address} within {timeout:g} s ({reason}); look for the error of rank "
        f"0, and check that this host reaches it and that both have the same secret (here: {key.source})."
    )


def _talk(connection: socket.socket, key: Key, said: dict[str, Any], until: float, deadline: float) -> dict[str, Any]:
    """The visitor's side: say it to who proves until then to be rank 0; what rank 0 answers before the deadline."""
    own = secrets.token_hex(16)
    connection.sendall(f"{_HELLO} {own}\n".encode())
    nonce, _, proof = _read_line(connection, _LINE_BYTES, until).partition(b" ")
    conversation = _Conversation(key, own + nonce.decode("ascii"))
    conversation.open(_ROOT, proof)
    connection.sendall(conversation.seal(_VISITOR, said))
    return conversation.open(_ROOT, _read_line(connection, _ANSWER_BYTES, deadline))


def _read_line(connection: socket.socket, most: int, until: float) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(1 << 16)
        if not data:
            raise ValueError("the connection ended")
        received += data
        if len(received) > most or time.monotonic() >= until:
            raise ValueError("what answers there is not rank 0")
    return bytes(received[:-1])
