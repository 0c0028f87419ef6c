"""One rank of a job: starts the command, sends its output and its end to ``hvdkit launch``, ends it when told to.

Run by path in an isolated interpreter (``python -I -S rank.py ADDRESS RANK_VARIABLE COMMAND ...``), so that it starts
in milliseconds and nothing in the user's directory or environment can get in its way; it therefore imports the standard
library only.

On several hosts there is no such connection: ADDRESS is "-" and the job's id, and COMMAND follows the seconds of grace.
The output goes to the launcher as it is, and the rank's end as a line of standard error that ``direct`` takes out.
Orders come as signals: those of PASS_ON, and SIGALRM for TERMINATE. Where the launcher passes none on, ``rank.py signal
NUMBER ADDRESS`` sends one to the job's ranks of a host.

Frames to ``hvdkit launch``: kind (1 byte), length (4 bytes, big endian), payload. From it: single bytes. The end of
the connection means the same as STOP, so that the ranks end when ``hvdkit launch`` dies, however it dies.
"""

import contextlib
import ctypes
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

HEADER = struct.Struct("!cI")
HELLO, STDOUT, STDERR, REPORT, EXIT, UNHANDLED = b"H", b"O", b"E", b"T", b"X", b"U"
HELLO_PAYLOAD = struct.Struct("!I")
"""Payload of HELLO: the rank."""
EXIT_PAYLOAD = struct.Struct("!i?I")
"""Payload of EXIT: exit status, or minus the signal that killed the command; whether it was told to end before; its
process id, 0 when it did not start."""
UNHANDLED_PAYLOAD = struct.Struct("!I")
"""Payload of UNHANDLED: the number of a signal that no process of the rank handles, so that it was not sent."""
STOP, TERMINATE, KILL, DUMP = b"S", b"T", b"K", b"D"
"""STOP: SIGTERM, and SIGKILL after ``STOP_GRACE_S``. TERMINATE: SIGTERM alone; STOP follows when all ranks have ended,
or KILL when the job's grace is over."""
PASS_ON = {signal.SIGUSR1: b"1", signal.SIGUSR2: b"2"}
"""Signals that a program handles as it likes, such as a batch system's warning that the time limit is near."""

STOP_GRACE_S = 3.0
"""Seconds from SIGTERM to SIGKILL when ``hvdkit launch`` ends the command after a failure, or is gone."""
LAUNCHER_GRACE_S = 0.6
"""The same when mpirun does: it kills this process a second after its SIGTERM, and the command must be gone before."""
HOROVODRUN_GRACE_S = 4.0
"""The same on several hosts when horovodrun does, which waits 5 s."""
ENDED = "\x1ehvdkit {} {} {:d} {} {}\x1e\n"
"""What a rank of several hosts says at its end: the fields of ``RankEnd``, without ``knock_on``."""
STARTED = "\x1ehvdkit started {}.{}\x1e\n"
"""What rank 0 says at its start. Under srun, which does not pass SIGTERM on: with the name by which scancel does."""

_KILL_S = 1.0
"""Seconds that killed processes have to be gone; one that a file system holds is not waited for longer."""
_CHUNK_BYTES = 65536
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_UNTIL_KILLED_S = 86400.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STACKS_SIGNAL = signal.SIGRTMAX - 2
"""Asks a process for its Python stacks: one that programs and batch systems leave alone."""
STACKS_DIRECTORY = Path(__file__).parent / "stacks"
"""Of the ``sitecustomize`` that gets a rank's Pythons ready for what ``hvdkit launch`` asks."""


def main(arguments: list[str]) -> int:
    """Run one rank; the status to exit with is the command's own, or 128 + N when signal N killed it."""
    address, rank_variable, *command = arguments
    if address == "signal":
        return _signal_job(int(rank_variable), *command)
    rank = os.environ.get(rank_variable, "")
    if not rank.isdigit():
        sys.stderr.write(f"{rank_variable} must be the rank, got {rank!r}: another launcher started this process.\n")
        return 1
    if address.startswith("-"):
        return _FarRank(float(command[0]), rank_variable).run(int(rank), command[1:])
    if "WORLD_SIZE" in os.environ:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + address)
        return _Rank(connection).run(int(rank), command)


def _signal_job(number: int, address: str) -> int:
    """Send a signal to the processes beside the ranks of a job on this host."""
    own = f"-I\0-S\0{__file__}\0{address}\0".encode()
    network = Path("/proc/self/ns/net").readlink()  # hosts may be containers that share their processes
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            words = (directory / "cmdline").read_bytes().partition(b"\0")[2]
            if words.startswith(own) and (directory / "ns/net").readlink() == network:
                _send_signal(int(directory.name), number)
    return 0


class _Rank:
    _output: int | None = subprocess.PIPE
    _launcher_grace_s = LAUNCHER_GRACE_S

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connected = True
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs: dict[int, bytes] = {}
        self._told_to_end = False
        self._may_leave = False
        self._asked_to_end: set[int] = set()
        self._kill_at: float | None = None

    def run(self, rank: int, command: list[str]) -> int:
        self._rank = rank
        self._watch_signals()
        adopt_orphans(True)
        self._selector.register(self._connection, selectors.EVENT_READ, self._on_order)
        self._send(HELLO, HELLO_PAYLOAD.pack(rank))
        try:
            process = self._start(command)
        except OSError as error:
            self._send(STDERR, f"hvdkit launch: {command[0]} cannot be started: {error.strerror}\n".encode())
            return self._leave(126 if isinstance(error, PermissionError) else 127)
        while process.poll() is None:
            self._wait()
        return self._leave(process.returncode)

    def _start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        reader, writer = _open_report_pipe()
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
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
        kill_descendants()
        self._kill_at = None
        for fd in list(self._outputs):
            while self._on_output(fd):
                pass
        pid = 0 if self._process is None else self._process.pid
        self._send(EXIT, EXIT_PAYLOAD.pack(status, self._told_to_end, pid))
        while (status != 0 or self._told_to_end) and not self._may_leave:
            self._wait()
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
        timeout = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()
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
        try:
            orders = self._connection.recv(64)
        except ConnectionError:
            orders = b""
        if not orders:
            self._selector.unregister(self._connection)
        if DUMP in orders:
            self._ask_for_stacks()
        if KILL in orders:
            self._end(0.0)
        elif STOP in orders or not orders:
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
            if number in _ENDING:
                self._end(self._launcher_grace_s)
            elif number in PASS_ON:
                self._pass_on(number)
            else:
                self._reap_orphans()

    def _end(self, grace_s: float, *, may_leave: bool = True) -> None:
        self._told_to_end = True
        self._may_leave |= may_leave
        self._ask_to_end()
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _ask_to_end(self) -> None:
        """Send SIGTERM, to each process once: a program that saves would begin again."""
        handling, others = first_that_handle(signal.SIGTERM)
        for pid in {*handling, *others} - self._asked_to_end:
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
        if self._connected:
            try:
                self._connection.sendall(HEADER.pack(kind, len(payload)) + payload)
            except ConnectionError:
                self._connected = False
                self._end(STOP_GRACE_S)

    def _watch_signals(self) -> None:
        self._wakeup, wakeup_end = socket.socketpair()
        wakeup_end.setblocking(False)
        signal.set_wakeup_fd(wakeup_end.detach(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_signals)
        for number in (signal.SIGCHLD, *_ENDING, *PASS_ON):
            signal.signal(number, lambda *_: None)


class _FarRank(_Rank):
    """One rank of several hosts, out of the reach of ``supervise``."""

    _output = None

    def __init__(self, grace_s: float, rank_variable: str) -> None:
        self._nobody, connection = socket.socketpair()
        super().__init__(connection)
        self._grace_s = grace_s
        self._hold_until: float | None = None
        # Slurm's SIGTERM is that of its users and of its time limit. Without control groups it goes to every process.
        under_slurm = rank_variable == "SLURM_PROCID"
        self._all_are_signalled = under_slurm and "/step_" not in Path("/proc/self/cgroup").read_text()
        own = {"SLURM_PROCID": grace_s, "HOROVOD_RANK": HOROVODRUN_GRACE_S}
        self._launcher_grace_s = own.get(rank_variable, LAUNCHER_GRACE_S)
        self._may_leave = True

    def _watch_signals(self) -> None:
        super()._watch_signals()
        signal.signal(signal.SIGALRM, lambda *_: self._terminate())
        threading.Thread(target=self._end_without_reader, daemon=True).start()

    @staticmethod
    def _end_without_reader() -> None:
        """Nobody reads the output any more: ``hvdkit launch`` was killed, and what it started with it, but not this."""
        look = select.poll()
        for fd in (1, 2):
            look.register(fd, 0)
        look.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    def _terminate(self) -> None:
        """End within the grace; and hold, since mpirun would kill the others, that still save, at the first end."""
        self._may_leave = False
        self._hold_until = time.monotonic() + self._grace_s
        self._end(self._grace_s, may_leave=False)

    def _ask_to_end(self) -> None:
        if self._all_are_signalled and not self._asked_to_end:
            self._asked_to_end.update(descendants())
        super()._ask_to_end()

    def _pass_on(self, number: int) -> None:
        if not self._all_are_signalled:
            super()._pass_on(number)

    def _wait(self) -> None:
        if self._hold_until is not None:
            self._kill_at = self._hold_until if self._kill_at is None else min(self._kill_at, self._hold_until)
            self._may_leave |= time.monotonic() >= self._hold_until
        super()._wait()

    def _leave(self, status: int) -> int:
        left = super()._leave(status)
        return 0 if self._told_to_end else left  # after another status launchers kill the others, which still save

    def _send(self, kind: bytes, payload: bytes) -> None:
        text = ""
        if kind == HELLO and self._rank == 0:
            text = STARTED.format(*(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")))
        elif kind == EXIT:
            status, told, pid = EXIT_PAYLOAD.unpack(payload)
            text = ENDED.format(self._rank, status, told, pid, socket.gethostname())
        elif kind == UNHANDLED:
            name = signal.Signals(UNHANDLED_PAYLOAD.unpack(payload)[0]).name
            text = f"hvdkit launch: {name} was not passed on to rank {self._rank}: no handler for it, or not yet.\n"
        self._say(payload if kind == STDERR else text.encode())

    @staticmethod
    def _say(text: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more
            os.write(2, text)


def _open_report_pipe() -> tuple[int, int]:
    """A pipe for what Python says of itself, and this environment, which the command inherits, changed to use it."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    os.environ["HVDKIT_STACKS"] = f"{writer}:{os.fstat(writer).st_ino}:{int(_STACKS_SIGNAL)}"
    paths = [str(STACKS_DIRECTORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return reader, writer


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
