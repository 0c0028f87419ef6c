"""The processes below one that sees to a rank, or to all of them: found, asked to end, killed, and why they died.

Only the standard library is used here: see ``rank``.
"""

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

_KILL_S = 1.0
"""Seconds that killed processes have to be gone; one that a file system holds is not waited for longer."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Ending:
    """How the processes below this one are ended: each is asked once, and what is left when its time is over is killed.

    Attributes:
        told: they were told to end.
        by_order: ``hvdkit launch`` did so, and not the launcher.
        may_leave: this process need not stay until ``hvdkit launch`` has seen the other ranks.
        asked: who has got SIGTERM.
        kill_at: when they are killed, by the monotonic clock; None while they are not to be.
    """

    def __init__(self) -> None:
        self.told = self.by_order = self.may_leave = False
        self.asked: set[int] = set()
        self.kill_at: float | None = None

    def tell(self, grace_s: float, *, by_order: bool = True, may_leave: bool = True) -> None:
        """Ask them to end, and kill what is left in so many seconds, or sooner where that was said before."""
        self.told = True
        self.by_order |= by_order
        self.may_leave |= may_leave
        self.ask()
        kill_at = time.monotonic() + grace_s
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def ask(self) -> None:
        """Send SIGTERM, to each process once: a program that saves would begin again.

        Parents come first: a shell would otherwise go on with its next command.
        """
        handling, others = first_that_handle(signal.SIGTERM)
        for pid in (*others, *handling):
            if pid not in self.asked:
                send_signal(pid, signal.SIGTERM)
                self.asked.add(pid)

    def kill_unasked(self) -> None:
        """Kill what a program that saved and ended leaves behind: its workers would save once more."""
        handling, others = first_that_handle(signal.SIGTERM)
        for pid in {*handling, *others} - self.asked:
            send_signal(pid, signal.SIGKILL)

    def kill_if_due(self) -> None:
        """Kill what is left when the time is over."""
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.kill_at = None
            kill_descendants()


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
        if pid not in ended and handles(pid, number):
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
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.01)
    return left


def with_state(pid: int) -> str:
    """A process id with the state that the kernel gives it: "pid 7 (D (disk sleep))"."""
    with contextlib.suppress(OSError, IndexError):  # it has ended after all
        status = Path(f"/proc/{pid}/status").read_text()
        return f"pid {pid} ({status.split('State:')[1].splitlines()[0].strip()})"
    return f"pid {pid}"


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, or blocks it, as one that waits for it with ``sigwait`` does."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return False
    masks = [int(status.split(name)[1].split()[0], 16) for name in ("SigCgt:", "SigBlk:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
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
