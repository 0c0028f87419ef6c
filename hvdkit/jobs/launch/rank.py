"""One rank of a job: starts the command, sends its output and its end to ``hvdkit launch``, ends it when told to.

Every launcher starts it, on every host: ``python -I -S rank.py HOST:PORT RANK_VARIABLE GRACE_S COMMAND ...``. It is
run by path in an isolated interpreter, so that it starts in milliseconds and nothing in the user's directory or
environment can get in its way; it therefore imports the standard library only.

``hvdkit launch`` listens at that address, and both show that they know HVDKIT_SECRET, which comes by the environment
and never stands on a command line (see ``proof``). Where it cannot be reached from this host, or the launcher
has not handed the secret on, the command runs all the same, seen to by the launcher alone.

Frames to ``hvdkit launch``: kind (1 byte), length (4 bytes, big endian), payload. From it: single bytes. The end of
the connection means the same as STOP, so that the ranks end when ``hvdkit launch`` dies, however it dies, and when the
network between fails.
"""

import contextlib
import ctypes
import hmac
import json
import os
import re
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

HEADER = struct.Struct("!cI")
HELLO, STDOUT, STDERR, REPORT, EXIT, UNHANDLED, SURVIVORS = b"H", b"O", b"E", b"T", b"X", b"U", b"V"
HELLO_PAYLOAD = struct.Struct("!II")
"""Payload of HELLO: the rank, and the process id of what is beside it; then the host's name."""
EXIT_PAYLOAD = struct.Struct("!i?I?Q")
"""Payload of EXIT: exit status, or minus the signal that killed the command; whether it was told to end before; its
process id, 0 when it did not start; whether the kernel killed a process of its cgroup because memory ran out, and the
bytes that the cgroup may have, 0 where it has no limit."""
UNHANDLED_PAYLOAD = struct.Struct("!I")
"""Payload of UNHANDLED: the number of a signal that no process of the rank handles, so that it was not sent."""
# The payload of SURVIVORS, before EXIT: what did not end by SIGKILL, a line for each process (``with_state``).
STOP, TERMINATE, KILL, DUMP, LEAVE = b"S", b"T", b"K", b"D", b"L"
"""STOP: SIGTERM, and SIGKILL after ``STOP_GRACE_S``. TERMINATE: SIGTERM alone; STOP follows when all ranks have ended,
or KILL when the job's grace is over. LEAVE, after EXIT: to leave with the command's own status."""
PASS_ON = {signal.SIGUSR1: b"1", signal.SIGUSR2: b"2"}
"""Signals that a program handles as it likes, such as a batch system's warning that the time limit is near."""

STOP_GRACE_S = 3.0
"""Seconds from SIGTERM to SIGKILL when ``hvdkit launch`` ends the command after a failure, or is gone."""
LAUNCHER_GRACE_S = {"OMPI_COMM_WORLD_RANK": 0.6, "PMI_RANK": 0.6, "HOROVOD_RANK": 4.0}
"""The same when the launcher does, by the variable in which it says the rank: mpirun kills this process a second after
its SIGTERM, horovodrun after five, and the command must be gone before. Batch systems leave it the job's grace."""
SECRET = "HVDKIT_SECRET"  # noqa: S105
WORKERS = "HVDKIT_WORKERS"
"""HOST:PORT of every rank in turn, of which TF_CONFIG is made (``--tf-config``)."""
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 4))
"""A connection is given up a minute after the network has failed: seconds until the other side is asked, between two
questions, and how many."""
_RETRANSMITTED = 8
"""The same for what was sent since: so often the kernel repeats it within a minute. TCP_USER_TIMEOUT would also end a
connection whose other side lives and reads nothing, as where a user looks at the output page by page."""
_LOOK_S = 5.0
"""Seconds between two looks at that."""
_CONNECT_S, _SHAKE_S = 10.0, 60.0
NONCE_BYTES = PROOF_BYTES = 32

_KILL_S = 1.0
"""Seconds that killed processes have to be gone; one that a file system holds is not waited for longer."""
_CHUNK_BYTES = 65536
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What a user or a batch system ends a job with."""
_UNTIL_KILLED_S = 86400.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STACKS_SIGNAL = signal.SIGRTMAX - 2
"""Asks a process for its Python stacks: one that programs and batch systems leave alone."""
STARTUP = Path(__file__).parents[2] / "observe" / "startup"
"""Of the ``sitecustomize`` that gets a rank's Pythons ready for what ``hvdkit launch`` asks."""


def main(arguments: list[str]) -> int:
    """Run one rank; the status to exit with is the command's own, or 128 + N when signal N killed it."""
    address, rank_variable, grace_s, *command = arguments
    try:
        rank = _rank(rank_variable)
        connection = connect(address)
    except ValueError as error:
        sys.stderr.write(f"hvdkit launch: {error}\n")
        return 1
    except OSError as error:  # a firewall, or a launcher that hands no environment on
        sys.stderr.write(f"hvdkit launch: {address} does not see to this rank, which runs all the same: {error}\n")
        return become(command)
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE", ""):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    if workers := os.environ.get(WORKERS):
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers.split(",")}, "task": task})
    with connection:
        grace = LAUNCHER_GRACE_S.get(rank_variable, float(grace_s))
        return _Rank(connection, grace, under_slurm=rank_variable == "SLURM_PROCID").run(rank, command)


def become(command: list[str]) -> int:
    """Run a command in place of this process; the status to exit with where it cannot be started."""
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        said, status = _not_started(command, error)
        sys.stderr.write(said)
        return status


def _not_started(command: list[str], error: OSError) -> tuple[str, int]:
    """A sentence on a command that cannot be started, and the status that a shell gives then."""
    status = 126 if isinstance(error, PermissionError) else 127
    return f"hvdkit launch: {command[0]} cannot be started: {error.strerror}\n", status


def _rank(variable: str) -> int:
    """This rank, from the variable of the launcher, or from whatever the launcher of a batch system sets.

    Raises:
        ValueError: nothing says it.
    """
    if variable:
        rank = os.environ.get(variable, "")
        if not rank.isdigit():
            raise ValueError(f"{variable} must be the rank, got {rank!r}: another launcher started this process.")
        return int(rank)
    before = list(sys.path)
    sys.path.append(str(Path(__file__).parents[3]))
    from hvdkit.errors import LauncherError
    from hvdkit.steps import launchers

    try:
        launched = launchers.detect(os.environ)
    except LauncherError as error:
        raise ValueError(str(error)) from error
    finally:
        sys.path[:] = before
    if launched is None:
        raise ValueError("the launcher says in no variable that is known here which rank this is.")
    return launched.rank


def connect(address: str) -> socket.socket:
    """A connection to ``hvdkit launch``, which has shown that it is the one that started this.

    Raises:
        ValueError: it has gone, or another program answers.
        OSError: it cannot be reached from here, or this process does not know the secret.
    """
    name, _, port = address.rpartition(":")
    if not os.environ.get(SECRET):
        raise OSError(f"the launcher did not hand {SECRET} on")
    try:
        connection = socket.create_connection((name, int(port)), _CONNECT_S)
    except ConnectionRefusedError as error:
        raise ValueError(f"the job's hvdkit launch at {address} has ended, and this rank with it.") from error
    try:
        keep_alive(connection)
        _shake_hands(connection, os.environ[SECRET])
    except OSError as error:
        raise ValueError(f"the job's hvdkit launch at {address} has ended ({error}), and this rank.") from error
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


def _shake_hands(connection: socket.socket, secret: str) -> None:
    """See that the other side knows the secret, and show that this rank does.

    It sends a nonce first, and its proof after that of the rank.

    Raises:
        OSError: it ends, or takes too long.
        ValueError: it does not know the secret.
    """
    connection.settimeout(_SHAKE_S)
    theirs, ours = _exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours + proof(secret, b"rank", theirs + ours))
    if not hmac.compare_digest(_exactly(connection, PROOF_BYTES), proof(secret, b"launch", theirs + ours)):
        raise ValueError("what answers in place of the job's hvdkit launch does not know its secret.")
    connection.settimeout(_LOOK_S)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it hung up")
        data += more
    return data


class _Rank:
    def __init__(self, connection: socket.socket, launcher_grace_s: float, *, under_slurm: bool) -> None:
        self._connection = connection
        self._launcher_grace_s = launcher_grace_s
        # Without control groups Slurm sends its SIGTERM to every process of a rank.
        groups = Path("/proc/self/cgroup")
        self._all_are_signalled = under_slurm and groups.exists() and "/step_" not in groups.read_text()
        self._memory = MemoryKills()
        self._connected = True
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs: dict[int, bytes] = {}
        self._told_to_end = False
        self._by_order = False
        self._may_leave = False
        self._asked_to_end: set[int] = set()
        self._kill_at: float | None = None

    def run(self, rank: int, command: list[str]) -> int:
        self._watch_signals()
        adopt_orphans(True)
        self._selector.register(self._connection, selectors.EVENT_READ, self._on_order)
        self._memory.watch(os.getpid())
        self._send(HELLO, HELLO_PAYLOAD.pack(rank, os.getpid()) + socket.gethostname().encode())
        try:
            process = self._start(command)
        except OSError as error:
            said, status = _not_started(command, error)
            self._send(STDERR, said.encode())
            return self._leave(status)
        while process.poll() is None:
            self._wait()
        return self._leave(process.returncode)

    def _start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        reader, writer = _open_report_pipe()
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Hydra hands its ranks an open socket (PMI_FD), which has to reach the command.
            close_fds=False,
            process_group=0,
            preexec_fn=dying_with_parent(signal.SIGKILL),
        )
        for stream, kind in ((process.stdout, STDOUT), (process.stderr, STDERR)):
            if stream is not None:
                self._read(stream.fileno(), kind)
        os.close(writer)
        self._read(reader, REPORT)
        return process

    def _read(self, fd: int, kind: bytes) -> None:
        os.set_blocking(fd, False)
        self._outputs[fd] = kind
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._on_output(fd))

    def _leave(self, status: int) -> int:
        """Report the end. A rank that failed, or is told to end, stays until ``hvdkit launch`` has seen the others.

        Left at once, the launcher would kill the others at the first exit: those that still save, too, and which of
        several ranks is seen to fail first would be decided by chance.
        """
        if status == 0 or self._told_to_end:
            self._end_what_is_left()
        if survivors := kill_descendants():
            self._send(SURVIVORS, "\n".join(map(with_state, survivors)).encode())
        self._kill_at = None
        for fd in list(self._outputs):
            while self._on_output(fd):
                pass
        pid = 0 if self._process is None else self._process.pid
        self._send(EXIT, EXIT_PAYLOAD.pack(status, self._told_to_end, pid, *self._memory.found()))
        while (status != 0 or self._told_to_end) and not self._may_leave:
            self._wait()
        with contextlib.suppress(OSError):  # closed with an order unread, it would take what was sent along
            self._connection.shutdown(socket.SHUT_WR)
        while self._connected and self._receive():
            pass
        if self._by_order:  # after another status launchers kill the others, which may still save
            return 0
        return status if status >= 0 else 128 - status

    def _end_what_is_left(self) -> None:
        """See the end of what the command started and did not wait for.

        Asked to end, it has as long for that as a rank has. Where the rank itself was asked, what a program that
        saved leaves behind is killed: its workers would save once more.
        """
        if not self._told_to_end:
            self._ask_to_end()
            self._kill_at = time.monotonic() + STOP_GRACE_S
        while self._kill_at is not None and descendants():
            if self._told_to_end:
                handling, others = first_that_handle(signal.SIGTERM)
                for pid in {*handling, *others} - self._asked_to_end:
                    _send_signal(pid, signal.SIGKILL)
            self._wait()

    def _wait(self) -> None:
        timeout = _LOOK_S if self._kill_at is None else max(0.0, min(_LOOK_S, self._kill_at - time.monotonic()))
        for key, _ in self._selector.select(timeout):
            key.data()
        if self._connected and self._unanswered():
            self._lose_connection()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            kill_descendants()

    def _on_output(self, fd: int) -> bool:
        """Pass on what the pipe holds; False when it holds nothing now or is at its end."""
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._send(self._outputs[fd], data)
            return True
        self._selector.unregister(fd)
        del self._outputs[fd]
        return False

    def _on_order(self) -> None:
        orders = self._receive()
        self._may_leave |= LEAVE in orders
        if not orders:
            self._selector.unregister(self._connection)
            self._lose_connection()
        if DUMP in orders:
            self._ask_for_stacks()
        if KILL in orders:
            self._end(0.0)
        elif STOP in orders:
            self._end(STOP_GRACE_S)
        elif TERMINATE in orders:
            self._end(_UNTIL_KILLED_S, may_leave=False)
        for number, order in PASS_ON.items():
            if order in orders:
                self._pass_on(number)

    def _ask_for_stacks(self) -> None:
        """Have every process of the command that is ready for it write its stacks; others would die of the signal."""
        ready = [pid for pid in descendants() if _handles(pid, _STACKS_SIGNAL)]
        for pid in ready:
            _send_signal(pid, _STACKS_SIGNAL)
        if not ready:
            self._send(REPORT, b"It has no Python process that hands in its stacks (python -I and -S prevent it).\n")

    def _on_signals(self) -> None:
        for number in self._wakeup.recv(64):
            if number in ENDING:
                if self._all_are_signalled and not self._asked_to_end:
                    self._asked_to_end.update(descendants())
                self._end(self._launcher_grace_s if self._connected else 0.0, by_order=False, may_leave=False)
            elif number in PASS_ON:
                if not self._all_are_signalled:
                    self._pass_on(number)
            else:
                self._reap_orphans()

    def _end(self, grace_s: float, *, by_order: bool = True, may_leave: bool = True) -> None:
        self._told_to_end = True
        self._by_order |= by_order
        self._may_leave |= may_leave
        self._ask_to_end()
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _ask_to_end(self) -> None:
        """Send SIGTERM, to each process once: a program that saves would begin again.

        Parents come first: a shell would otherwise go on with its next command.
        """
        handling, others = first_that_handle(signal.SIGTERM)
        for pid in (*others, *handling):
            if pid not in self._asked_to_end:
                _send_signal(pid, signal.SIGTERM)
                self._asked_to_end.add(pid)

    def _pass_on(self, number: int) -> None:
        """Send a signal to who handles it; whoever does not would die of it: a shell, or a rank that only starts."""
        handling, _ = first_that_handle(number)
        for pid in handling:
            _send_signal(pid, number)
        if not handling:
            self._send(UNHANDLED, UNHANDLED_PAYLOAD.pack(number))

    def _reap_orphans(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if self._process is None or found.si_pid == self._process.pid:
                    return
                os.waitpid(found.si_pid, 0)

    def _send(self, kind: bytes, payload: bytes) -> None:
        unsent = memoryview(HEADER.pack(kind, len(payload)) + payload)
        while unsent and self._connected:
            try:
                unsent = unsent[self._connection.send(unsent) :]
            except OSError as error:
                if not isinstance(error, TimeoutError) or self._unanswered():
                    self._lose_connection()

    def _receive(self) -> bytes:
        """Orders, as soon as there are some; none at the end of the connection."""
        while True:
            try:
                return self._connection.recv(64)
            except OSError as error:
                if not isinstance(error, TimeoutError) or self._unanswered():
                    return b""

    def _unanswered(self) -> bool:
        """Whether the network has failed; keep-alive asks only where all that was sent has been acknowledged."""
        _state, _ca_state, retransmits = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)
        return retransmits >= _RETRANSMITTED

    def _lose_connection(self) -> None:
        # Where the launcher ends the ranks, too, hvdkit launch was killed: the launcher soon kills this process, and
        # nobody would be left to end what the command started.
        by_launcher = self._told_to_end and not self._by_order
        self._connected = False
        self._end(0.0 if by_launcher else STOP_GRACE_S)

    def _watch_signals(self) -> None:
        self._wakeup, wakeup_end = socket.socketpair()
        wakeup_end.setblocking(False)
        signal.set_wakeup_fd(wakeup_end.detach(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_signals)
        for number in (signal.SIGCHLD, *ENDING, *PASS_ON):
            signal.signal(number, lambda *_: None)


_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_LIMITS = {"memory.events": "memory.max", "memory.oom_control": "memory.limit_in_bytes"}
"""The file of a cgroup's limit by the file that counts what was killed for want of memory, of versions 2 and 1."""
_NO_LIMIT = 1 << 60


class MemoryKills:
    """Counts what the kernel has killed in a rank's cgroup, of a batch job, a container or systemd, for want of memory.

    Args:
        proc, cgroups: where these file systems are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._before: dict[Path, int] = {}

    def watch(self, pid: int) -> None:
        """Count in the cgroup of this process from now on."""
        for counter in self._counters(pid):
            self._before.setdefault(counter, self._count(counter))

    def found(self) -> tuple[bool, int]:
        """Whether it has killed since, and how many bytes the cgroup may have; 0 for no limit."""
        for counter, before in self._before.items():
            if self._count(counter) > before:
                with contextlib.suppress(OSError, ValueError):  # "max", or gone
                    limit = int(counter.with_name(_LIMITS[counter.name]).read_text())
                    return True, limit if limit < _NO_LIMIT else 0
                return True, 0
        return False, 0

    def _counters(self, pid: int) -> list[Path]:
        found = []
        with contextlib.suppress(OSError):  # it has just ended
            for line in (self._proc / str(pid) / "cgroup").read_text().splitlines():
                number, controllers, path = line.split(":", 2)
                if number == "0" or "memory" in controllers.split(","):
                    mounted = self._cgroups if number == "0" else self._cgroups / "memory"
                    inside = mounted / path.lstrip("/")
                    # In a container the path may be that of the host, and only the container's own cgroup is mounted.
                    here = inside if inside.is_dir() else mounted
                    found.append(here / ("memory.events" if number == "0" else "memory.oom_control"))
        return found

    @staticmethod
    def _count(counter: Path) -> int:
        with contextlib.suppress(OSError):  # no such version of cgroups here, or it is gone
            if (kills := _KILLS.search(counter.read_text())) is not None:
                return int(kills[1])
        return 0


def _open_report_pipe() -> tuple[int, int]:
    """A pipe for what Python says of itself, and this environment, which the command inherits, changed to use it."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    os.environ["HVDKIT_STACKS"] = f"{writer}:{os.fstat(writer).st_ino}:{int(_STACKS_SIGNAL)}"
    os.environ["PYTHONPATH"] = with_startup(os.environ)
    return reader, writer


def with_startup(environ: Mapping[str, str]) -> str:
    """PYTHONPATH with the directory of our ``sitecustomize`` in front."""
    return os.pathsep.join([str(STARTUP), *filter(None, [environ.get("PYTHONPATH")])])


def adopt_orphans(adopt: bool) -> None:
    """Become the parent of every process below this one whose own parent ends, in any session; or no more."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(adopt))


def descendants(spared: Collection[int] = ()) -> list[int]:
    """Every process below this one that has not ended, parents first; without those spared and what is below them."""
    children, ended = _processes()
    found = [os.getpid()]
    for pid in found:
        found += [child for child in children.get(pid, []) if child not in spared]
    return [pid for pid in found[1:] if pid not in ended]


def first_that_handle(number: int) -> tuple[list[int], list[int]]:
    """The processes below this one that handle a signal, and those that do not.

    What is below one that handles it is in neither list: its workers are its own to end, and have inherited a handler
    that is not meant for them.
    """
    children, ended = _processes()
    handling, others = [], []
    looked_at = list(children.get(os.getpid(), []))
    for pid in looked_at:
        if pid not in ended and _handles(pid, number):
            handling.append(pid)
            continue
        others += [] if pid in ended else [pid]
        looked_at += children.get(pid, [])
    return handling, others


def _processes() -> tuple[dict[int, list[int]], set[int]]:
    """Of every process of this machine its children, and those that have ended."""
    children: dict[int, list[int]] = {}
    ended = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            pid = int(directory.name)
            state, parent = (directory / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            children.setdefault(int(parent), []).append(pid)
            if state in b"ZX":
                ended.add(pid)
    return children, ended


def kill_descendants(spared: Collection[int] = ()) -> list[int]:
    """Kill every process below this one, also those that are started meanwhile; those that a second did not end."""
    deadline = time.monotonic() + _KILL_S
    while (left := descendants(spared)) and time.monotonic() < deadline:
        for pid in left:
            _send_signal(pid, signal.SIGKILL)
        time.sleep(0.01)
    return left


def with_state(pid: int) -> str:
    """A process id with the state that the kernel gives it: "pid 7 (D (disk sleep))"."""
    with contextlib.suppress(OSError, IndexError):  # it has ended after all
        status = Path(f"/proc/{pid}/status").read_text()
        return f"pid {pid} ({status.split('State:')[1].splitlines()[0].strip()})"
    return f"pid {pid}"


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, or blocks it, as one that waits for it with ``sigwait`` does."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return False
    masks = [int(status.split(name)[1].split()[0], 16) for name in ("SigCgt:", "SigBlk:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has just ended, or is another user's
        os.kill(pid, number)


def dying_with_parent(number: int) -> Callable[[], None]:
    """What the child runs before the command: have the kernel send it this signal when this process is killed."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
