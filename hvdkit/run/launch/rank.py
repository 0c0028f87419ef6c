"""One rank of a job: starts the command, sends its output and its end to ``hvdkit launch``, ends it when told to.

Run by path in an isolated interpreter (``python -I -S rank.py ADDRESS RANK_VARIABLE COMMAND ...``), so that it starts
in milliseconds and nothing in the user's directory or environment can get in its way; it therefore imports the standard
library only.

Frames to ``hvdkit launch``: kind (1 byte), length (4 bytes, big endian), payload. From it: single bytes. The end of
the connection means the same as STOP, so that the ranks end when ``hvdkit launch`` dies, however it dies.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

HEADER = struct.Struct("!cI")
HELLO, STDOUT, STDERR, REPORT, EXIT = b"H", b"O", b"E", b"T", b"X"
HELLO_PAYLOAD = struct.Struct("!I")
"""Payload of HELLO: the rank."""
EXIT_PAYLOAD = struct.Struct("!i?I")
"""Payload of EXIT: exit status, or minus the signal that killed the command; whether it was told to end before; its
process id, 0 when it did not start."""
STOP, KILL, DUMP = b"S", b"K", b"D"

STOP_GRACE_S = 3.0
"""Seconds from SIGTERM to SIGKILL when ``hvdkit launch`` ends the command."""
LAUNCHER_GRACE_S = 0.6
"""The same when mpirun does: it kills this process a second after its SIGTERM, and the command must be gone before."""

_KILL_S = 1.0
"""Seconds that killed processes have to be gone; one that a file system holds is not waited for longer."""
_CHUNK_BYTES = 65536
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STACKS_SIGNAL = signal.SIGRTMAX - 2
"""Asks a process for its Python stacks: one that programs and batch systems leave alone."""
STACKS_DIRECTORY = Path(__file__).parent / "stacks"
"""Of the ``sitecustomize`` that gets a rank's Pythons ready for what ``hvdkit launch`` asks."""


def main(arguments: list[str]) -> int:
    """Run one rank; the status to exit with is the command's own, or 128 + N when signal N killed it."""
    address, rank_variable, *command = arguments
    rank = os.environ.get(rank_variable, "")
    if not rank.isdigit():
        sys.stderr.write(f"{rank_variable} must be the rank, got {rank!r}: another launcher started this process.\n")
        return 1
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + address)
        return _Rank(connection).run(int(rank), command)


class _Rank:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connected = True
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs: dict[int, bytes] = {}
        self._told_to_end = False
        self._kill_at: float | None = None

    def run(self, rank: int, command: list[str]) -> int:
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
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Hydra hands its ranks an open socket (PMI_FD), which has to reach the command.
            close_fds=False,
            process_group=0,
            preexec_fn=_dying_with_parent(),
        )
        for stream, kind in ((process.stdout, STDOUT), (process.stderr, STDERR)):
            if stream is not None:  # both are pipes
                self._read(stream.fileno(), kind)
        os.close(writer)
        self._read(reader, REPORT)
        return process

    def _read(self, fd: int, kind: bytes) -> None:
        os.set_blocking(fd, False)
        self._outputs[fd] = kind
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._on_output(fd))

    def _leave(self, status: int) -> int:
        """Report the end. A rank that failed stays until ``hvdkit launch`` has seen how the others fare.

        Left at once, the launcher would kill the others at the first exit, and which of several ranks is seen to
        fail first would be decided by chance.
        """
        if status == 0 and not self._told_to_end:
            self._end_what_is_left()
        kill_descendants()
        self._kill_at = None
        for fd in list(self._outputs):
            while self._on_output(fd):
                pass
        pid = 0 if self._process is None else self._process.pid
        self._send(EXIT, EXIT_PAYLOAD.pack(status, self._told_to_end, pid))
        while status != 0 and not self._told_to_end:
            self._wait()
        return status if status >= 0 else 128 - status

    def _end_what_is_left(self) -> None:
        """Ask what the command started and did not wait for to end; it has as long for that as a rank has."""
        self._signal_all(signal.SIGTERM)
        self._kill_at = time.monotonic() + STOP_GRACE_S
        while self._kill_at is not None and descendants():
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

    def _ask_for_stacks(self) -> None:
        """Have every process of the command that is ready for it write its stacks; others would die of the signal."""
        ready = _descendants_that_catch(_STACKS_SIGNAL)
        for pid in ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _STACKS_SIGNAL)
        if not ready:
            self._send(REPORT, b"It has no Python process that hands in its stacks (python -I and -S prevent it).\n")

    def _on_signals(self) -> None:
        for number in self._wakeup.recv(64):
            if number in _ENDING:
                self._end(LAUNCHER_GRACE_S)
            elif number in _PASSED_ON:
                self._signal_group(number)
            else:
                self._reap_orphans()

    def _end(self, grace_s: float) -> None:
        self._told_to_end = True
        self._signal_all(signal.SIGTERM)
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _signal_all(self, number: int) -> None:
        self._signal_group(number)
        for pid in descendants():
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if self._process is None or os.getpgid(pid) != self._process.pid:
                    os.kill(pid, number)

    def _reap_orphans(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if self._process is None or found.si_pid == self._process.pid:
                    return
                os.waitpid(found.si_pid, 0)

    def _signal_group(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

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
        for number in (signal.SIGCHLD, *_ENDING, *_PASSED_ON):
            signal.signal(number, lambda *_: None)


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
    children: dict[int, list[int]] = {}
    ended = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            pid = int(directory.name)
            state, parent = (directory / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if pid not in spared:
                children.setdefault(int(parent), []).append(pid)
            if state in b"ZX":
                ended.add(pid)
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return [pid for pid in found[1:] if pid not in ended]


def kill_descendants(spared: Collection[int] = ()) -> list[int]:
    """Kill every process below this one, also those that are started meanwhile; those that a second did not end."""
    deadline = time.monotonic() + _KILL_S
    while (left := descendants(spared)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return left


def _descendants_that_catch(number: int) -> list[int]:
    """The processes below this one that have a handler for a signal."""
    found = []
    for pid in descendants():
        with contextlib.suppress(OSError):  # it has just ended
            caught = int(Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0], 16)
            if caught >> (number - 1) & 1:
                found.append(pid)
    return found


def _dying_with_parent() -> Callable[[], None]:
    """What the child runs before the command: have the kernel kill it when this process is killed."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
