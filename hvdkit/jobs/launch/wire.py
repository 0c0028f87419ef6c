"""What ``hvdkit launch`` and the process beside each rank say to one another, and how each shows that it may.

Both show that they know HVDKIT_SECRET, which comes by the environment and never stands on a command line. Frames to
``hvdkit launch``: kind (1 byte), length (4 bytes, big endian), payload. From it: single bytes. Only the standard
library is used here: see ``rank``.
"""

import hmac
import os
import secrets
import signal
import socket
import struct

HEADER = struct.Struct("!cI")
HELLO, STDOUT, STDERR, REPORT, EXIT, UNHANDLED, SURVIVORS, HERE = b"H", b"O", b"E", b"T", b"X", b"U", b"V", b"Y"
HELLO_PAYLOAD = struct.Struct("!II")
"""Payload of HELLO: the rank, and the process id of what is beside it; then the host's name."""
EXIT_PAYLOAD = struct.Struct("!i?I?Q")
"""Payload of EXIT: exit status, or minus the signal that killed the command; whether it was told to end before; its
process id, 0 when it did not start; whether the kernel killed a process of its cgroup because memory ran out, and the
bytes that the cgroup may have, 0 where it has no limit."""
UNHANDLED_PAYLOAD = struct.Struct("!I")
"""Payload of UNHANDLED: the number of a signal that no process of the rank handles, so that it was not sent."""
# The payload of SURVIVORS, before EXIT: what did not end by SIGKILL, a line for each process (``with_state``).
STOP, TERMINATE, KILL, DUMP, LEAVE, ASK = b"S", b"T", b"K", b"D", b"L", b"A"
"""STOP: SIGTERM, and SIGKILL after ``STOP_GRACE_S``. TERMINATE: SIGTERM alone; STOP follows when all ranks have ended,
or KILL when the job's grace is over. LEAVE, after EXIT: to leave with the command's own status. ASK: to answer
HERE, which a host that is lost does not."""
PASS_ON = {signal.SIGUSR1: b"1", signal.SIGUSR2: b"2"}
"""Signals that a program handles as it likes, such as a batch system's warning that the time limit is near."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What a user or a batch system ends a job with."""
STOP_GRACE_S = 3.0
"""Seconds from SIGTERM to SIGKILL when ``hvdkit launch`` ends the command after a failure, or is gone."""

SECRET = "HVDKIT_SECRET"  # noqa: S105
NONCE_BYTES = PROOF_BYTES = 32
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 4))
"""A connection is given up a minute after the network has failed: seconds until the other side is asked, between two
questions, and how many."""
RETRANSMITTED = 8
"""The same for what was sent since: so often the kernel repeats it within a minute. TCP_USER_TIMEOUT would also end a
connection whose other side lives and reads nothing, as where a user looks at the output page by page."""
LOOK_S = 5.0
"""Seconds between two looks at that."""
_CONNECT_S, _SHAKE_S = 10.0, 60.0


def connect(address: str) -> socket.socket:
    """A connection to ``hvdkit launch``, which has shown that it is the one that started this.

    Raises:
        ValueError: it has gone, or another program answers.
        OSError: it cannot be reached from here, or this process does not know the secret.
    """
    name, _, port = address.rpartition(":")
    secret = os.environ.get(SECRET)
    if not secret:
        raise OSError(f"the launcher did not hand {SECRET} on")
    try:
        connection = socket.create_connection((name, int(port)), _CONNECT_S)
    except ConnectionRefusedError as error:
        raise ValueError(f"the job's hvdkit launch at {address} has ended, and this rank with it.") from error
    try:
        keep_alive(connection)
        connection.settimeout(_SHAKE_S)
        theirs, ours = _exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours + proof(secret, b"rank", theirs + ours))
        shown = _exactly(connection, PROOF_BYTES)
    except OSError as error:
        raise ValueError(f"the job's hvdkit launch at {address} has ended ({error}), and this rank.") from error
    if not hmac.compare_digest(shown, proof(secret, b"launch", theirs + ours)):
        raise ValueError("what answers in place of the job's hvdkit launch does not know its secret.")
    connection.settimeout(LOOK_S)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Have the end of a connection noticed when the other host, or the network between, has failed without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def proof(secret: str, who: bytes, nonces: bytes) -> bytes:
    """What shows that one knows the secret of the job: 32 bytes.

    Args:
        secret: of the job.
        who: b"rank" or b"launch".
        nonces: what both sides have drawn, that of ``hvdkit launch`` first.
    """
    return hmac.digest(secret.encode(), b"hvdkit launch " + who + nonces, "sha256")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it hung up")
        data += more
    return data


class Channel:
    """The side of a rank: frames go out, orders come in, until it is lost.

    Attributes:
        connection: as ``connect`` makes it.
        lost: ``hvdkit launch`` has gone, or the network has failed; nothing is sent any more.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lost = False

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send a frame."""
        unsent = memoryview(HEADER.pack(kind, len(payload)) + payload)
        while unsent and not self.lost:
            try:
                unsent = unsent[self.connection.send(unsent) :]
            except TimeoutError:
                self.look()
            except OSError:
                self.lost = True

    def receive(self) -> bytes:
        """Orders, as soon as there are some; none where it is lost."""
        while not self.lost:
            try:
                orders = self.connection.recv(64)
            except TimeoutError:
                self.look()
            except OSError:
                self.lost = True
            else:
                self.lost = not orders
                return orders
        return b""

    def look(self) -> None:
        """See whether the network has failed; keep-alive asks only where all that was sent has been acknowledged."""
        _state, _ca_state, retransmits = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)
        self.lost |= retransmits >= RETRANSMITTED
