"""What a rank says of itself to ``hvdkit launch``: where it stands when the job no longer moves, and what it lost.

Also run by path in Pythons that have no hvdkit (``observe/startup``): nothing but the standard library is imported
at import time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

VARIABLE = "HVDKIT_STACKS"
"""``FD:INODE:SIGNAL``: a pipe to the process that watches this rank, and the signal at which stacks go into it."""
IN_INIT, PAST_INIT, KILLED_WORKER = b"in init", b"past init", b"killed worker"
JOINED, TRAINED = b"joined others", b"trained"
"""What a rank reports beside its stacks: a line that begins with a zero byte, numbers follow after blanks."""
STALLED_STATUS = 75
"""Exit status of a job that was ended because it no longer moved (EX_TEMPFAIL of sysexits.h)."""


def hand_in_stacks_when_asked() -> bool:
    """Have the Python stacks of all threads written to the launcher's pipe when the launcher's signal comes.

    Written in C by ``faulthandler``, so that it works in a process that waits forever in a C library or a lock. The
    program sees nothing of it and goes on.

    Returns:
        False when nobody asks, which is the case without ``hvdkit launch``; also in a process that inherited the
        variable but not the pipe.
    """
    asked = _asked()
    if asked is None:
        return False
    fd, number = asked
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    return True


def report(what: bytes) -> None:
    """Tell the launcher, where there is one that listens."""
    asked = _asked()
    if asked is not None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(asked[0], b"\0" + what + b"\n")


@contextlib.contextmanager
def reported_init() -> Iterator[None]:
    """In here this process waits for all other ranks; the launcher knows of it."""
    report(IN_INIT)
    try:
        yield
    finally:
        report(PAST_INIT)


def _asked() -> tuple[int, int] | None:
    """The launcher's pipe and signal; None where there is no such pipe."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return None
    fd, inode, number = map(int, asked.split(":"))
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    if not stat.S_ISFIFO(found.st_mode) or found.st_ino != inode:
        return None  # a number of the parent's, meanwhile a file of the program's own
    return fd, number


@contextlib.contextmanager
def must_go_on(seconds: float, directory: str | Path, rank: int) -> Iterator[Callable[[], None]]:
    """End this process when it makes no progress for a while: ``--stall-timeout`` for any launcher and any hang.

    Each rank watches itself, and the slowest limit counts; which rank is to blame is read from the files. ::

        with must_go_on(600, "stacks", world.rank) as going_on:
            for batch in loader:
                train(batch)
                going_on()

    Args:
        seconds: longest time between two calls, and before the first; > 0.
        directory: where ``rank-K.txt`` with the Python stacks of all threads is written; made when it is needed.
        rank: this process, 0 .. size-1, for the file's name.
    Yields:
        What to call after each step. When it is late, the process ends with status 75, without any clean-up, which
        would wait for the other ranks.
    Raises:
        InvalidArgumentError: seconds is not above 0.
    """
    if not 0 < seconds < threading.TIMEOUT_MAX:
        from hvdkit.errors import InvalidArgumentError  # not at import time, see above

        raise InvalidArgumentError(f"seconds must be a number above 0, got {seconds!r}.")
    last = time.monotonic()
    left = threading.Event()

    def going_on() -> None:
        nonlocal last
        last = time.monotonic()

    def watch() -> None:
        while (wait := last + seconds - time.monotonic()) > 0:
            if left.wait(wait):
                return
        _end(seconds, Path(directory), rank)

    watcher = threading.Thread(target=watch, name="hvdkit must_go_on", daemon=True)
    watcher.start()
    try:
        yield going_on
    finally:
        left.set()
        watcher.join()


def _end(seconds: float, directory: Path, rank: int) -> None:
    where = directory / f"rank-{rank}.txt"
    what = f"rank {rank} made no progress for {seconds:g} s"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with where.open("w") as file:
            file.write(f"{what}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        sys.stderr.write(f"hvdkit: {what}; its stacks are in {where}.\n")
    except OSError as error:
        sys.stderr.write(f"hvdkit: {what}; its stacks cannot be written to {where} ({error.strerror}).\n")
    sys.stderr.flush()
    os._exit(STALLED_STATUS)
