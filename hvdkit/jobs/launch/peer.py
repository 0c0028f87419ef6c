"""What wakes the loop of ``supervise``: ranks that connect, what each says and how it ends; and signals."""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from hvdkit.common.programs import handled, signal_name
from hvdkit.common.units import bytes_text
from hvdkit.jobs.launch import wire
from hvdkit.jobs.launch.output import ErrorStream
from hvdkit.jobs.launch.stall import StallReports
from hvdkit.steps.stalls import IN_INIT, JOINED, KILLED_WORKER, PAST_INIT, TRAINED

RECEIVE_BYTES = 1 << 18
"""The most that is read at once."""
_REPORTED = re.compile(
    rb"\0(?:(?P<init>%b|%b)|(?P<joined>%b)|(?P<trained>%b)|%b (?P<worker>\d+) (?P<signal>\d+))\n"
    % (IN_INIT, PAST_INIT, JOINED, TRAINED, KILLED_WORKER)
)
_LOOKED_UP = 4
"""Names of hosts that are looked up for the way to them."""
_SOMEWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737), by which the kernel says with which one this host goes to others."""


def listener(named: Sequence[str], *, here: bool) -> tuple[socket.socket, str]:
    """A socket for the ranks, and where they find it: ``ADDRESS:PORT``.

    Args:
        named: hosts of the job, as far as they are known.
        here: all ranks are on this machine.
    """
    own = "127.0.0.1" if here else _own_address(named)
    try:
        server = socket.create_server((own, 0), backlog=socket.SOMAXCONN)
    except OSError:  # no loopback interface: what the launcher says then is the cause
        server = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    server.setblocking(False)
    return server, f"{own}:{server.getsockname()[1]}"


def _own_address(named: Sequence[str]) -> str:
    """This host's address as the first of these reaches it that is another host, or as hosts that it does not know."""
    from hvdkit.steps import bootstrap  # imports a server of HTTP, which a job on this machine alone does without

    for name in (*named[:_LOOKED_UP], _SOMEWHERE):
        with contextlib.suppress(OSError, UnicodeError, subprocess.TimeoutExpired):  # the launcher may know it
            own = bootstrap.own_address(bootstrap.address_of(name))
            if not own.startswith("127."):
                return own
    return "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: 0 .. n-1.
        status: its exit status, or minus the number of the signal that killed it.
        told: it was told to end, by this launcher or by mpirun, before it ended.
        knock_on: it wrote that Horovod lost a peer, or that the root failed.
        pid: process id of its command, 0 when it is not known.
        host: where it ran; "" on one host.
        out_of_memory: the kernel killed a process of its cgroup because memory ran out.
        limit: bytes that this cgroup may have, 0 for no limit.
        how: what to say where the status does not say how it ended.
    """

    rank: int
    status: int
    told: bool = False
    knock_on: bool = False
    pid: int = 0
    host: str = ""
    out_of_memory: bool = False
    limit: int = 0
    how: str = ""

    @property
    def memory(self) -> str:
        """What to add to a sentence on a process that was killed: "" where the kernel has killed none for memory."""
        if not self.out_of_memory:
            return ""
        limit = f" (the limit of its cgroup is {bytes_text(self.limit)})" if self.limit else ""
        return f" because memory ran out{limit}"

    @property
    def exit_status(self) -> int:
        """The status as a shell gives it: 128 + N after signal N."""
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        who = f"rank {self.rank} (pid {self.pid}{where})" if self.pid else f"rank {self.rank}{where}"
        if self.how or self.status >= 0:
            return f"{who} {self.how or f'exited with status {self.status}'}"
        return f"{who} was killed by {signal_name(-self.status)}"


@dataclass(eq=False)
class Peer:
    """The process beside one rank, see ``rank``.

    Attributes:
        connection: to it; not blocking.
        nonce: what it has to show that it knows the secret of.
        known: it has shown that.
        pid: its process id.
        host: the name of its host.
        rank: which rank it is, None until it has said so.
        received: the beginning of a frame whose rest has not come yet.
        errors: what the rank writes to standard error.
        reports: Horovod's stall reports in it; None where nobody asked for them.
        in_init: it is inside Horovod's ``init``; None until then.
        joined: it has found other ranks: Horovod, MPI, a process group or a strategy of TensorFlow has.
        trained: an optimizer of it has taken a step.
        killed_workers: processes that it started and that a signal killed: process id and signal.
        stacks: the Python stacks that it handed in.
        silent: it was asked and has not answered, or the network to it has failed; None where it was not asked.
        end: how the rank ended, None until then.
    """

    connection: socket.socket
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(wire.NONCE_BYTES))
    known: bool = False
    pid: int = 0
    host: str = ""
    rank: int | None = None
    received: bytearray = field(default_factory=bytearray)
    errors: ErrorStream = field(default_factory=ErrorStream)
    reports: StallReports | None = None
    in_init: bool | None = None
    joined: bool = False
    trained: bool = False
    killed_workers: list[tuple[int, int]] = field(default_factory=list)
    stacks: bytearray = field(default_factory=bytearray)
    silent: bool | None = None
    end: RankEnd | None = None

    def order(self, order: bytes) -> None:
        """Tell it to stop, kill or dump."""
        with contextlib.suppress(OSError):  # it has just ended by itself
            self.connection.send(order)

    def answered(self) -> None:
        """It is there, or its host has said that it is not."""
        if self.silent:
            self.silent = False

    def shake_hands(self, data: bytes, secret: str) -> bool | None:
        """Take the answer to the nonce, and show that this side knows the secret, too.

        Returns:
            True once it has shown that, None while it has not said enough, False for a stranger.
        """
        self.received += data
        size = wire.NONCE_BYTES + wire.PROOF_BYTES
        if len(self.received) < size:
            return None
        nonces = self.nonce + self.received[: wire.NONCE_BYTES]
        if not hmac.compare_digest(self.received[wire.NONCE_BYTES : size], wire.proof(secret, b"rank", nonces)):
            return False
        del self.received[:size]
        self.known = True
        self.order(wire.proof(secret, b"launch", nonces))
        return True

    def report(self, data: bytes) -> None:
        """Take what its Pythons say: stacks, and lines of ``stalls.report`` among them."""
        self.stacks += data
        for found in _REPORTED.finditer(bytes(self.stacks)):
            if found["worker"]:
                self.killed_workers.append((int(found["worker"]), int(found["signal"])))
            elif found["init"]:
                self.in_init = found["init"] == IN_INIT
            self.joined |= bool(found["joined"])
            self.trained |= bool(found["trained"])
        self.stacks[:] = _REPORTED.sub(b"", self.stacks)

    def receive(self) -> bytes:
        """What has come; nothing when the connection is at its end."""
        try:
            data = self.connection.recv(RECEIVE_BYTES)
        except ConnectionError:
            data = b""
        except OSError:
            self.silent = True
            return b""
        if not data:
            self.answered()
        return data

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


@dataclass
class Signals:
    """Signals as events of the one loop that sees everything else."""

    wakeup: socket.socket
    received: deque[int] = field(default_factory=deque)
    interrupted: bool = False

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler; what follows from the signal is done by the loop."""
        self.received.append(number)
        self.interrupted = self.interrupted or number in wire.ENDING


@contextlib.contextmanager
def watched_signals() -> Iterator[Signals]:
    """Collect the signals that end a job, that its ranks handle, or that say that a child has ended."""
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.setblocking(False)
        signals = Signals(receiver)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            with handled((signal.SIGCHLD, *wire.ENDING, *wire.PASS_ON), signals.note):
                yield signals
        finally:
            signal.set_wakeup_fd(previous_fd)


# Which rank's end decides how a job ended


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended.

    Attributes:
        status: 0, or the exit status of the first rank that failed (128 + N after signal N); without such a rank that
            of the launcher; 128 + N when signal N told this process to end the job.
        interrupted: this process was told to end it, or nobody reads its output any more.
        failure: the rank that failed first by itself, None without one.
    """

    status: int
    interrupted: bool
    failure: RankEnd | None = None


def first_failure(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The rank that failed first by itself, None if none did.

    Args:
        ends: in the order in which they happened.
    Returns:
        The first failure. A rank that failed because it lost a peer may well be gone before that peer (which still
        has its libraries to close), so it counts only if nothing else failed.
    """
    failures = [end for end in ends if end.status != 0 and not end.told]
    return min(failures, key=lambda end: end.knock_on, default=None)


def left_early(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The first rank that ended well while others, which then only lost a peer or were told to end, were not done.

    Args:
        ends: in the order in which they happened.
    Returns:
        None if none did, or if a rank failed by itself.
    """
    known = list(ends)
    failure = first_failure(known)
    if (failure is None and not any(end.told for end in known)) or (failure is not None and not failure.knock_on):
        return None
    first = next((end for end in known if end.status == 0 or end.told), None)
    return None if first is None or first.told else first


def cause(failure: RankEnd, workers: Iterable[tuple[int, int]]) -> str:
    """What killed a rank, or the process of its own that it had lost, for a sentence's end; "" for neither.

    Args:
        workers: of this rank, those that were killed: process id and signal, in the order in which they were.
    """
    if failure.status == -signal.SIGKILL:
        return failure.memory
    for pid, number in workers:
        memory = failure.memory if number == signal.SIGKILL else ""
        return f" after its worker (pid {pid}) had been killed by {signal_name(number)}{memory}"
    return ""
