"""Step 6: only one job at a time writes into a directory of checkpoints.

Its root holds a POSIX record lock on ``.lock`` there: the kernel releases it when the process ends, however it ends,
and a process that it forks, such as a loader's worker, does not inherit it. ``.lock`` is opened once and never read,
since closing any descriptor of a file drops all of the process's locks on it. Who the holder is stands in
``.writer.json`` beside it, for the other job's error, and is read again around each save: where the file system has no
locks, or each host has its own (Lustre's localflock, NFS's nolock), a job that finds another one there stops.

Source: fcntl(2), "Advisory record locking".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import secrets
import socket
import stat
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps import launchers

LOCK, WRITER = ".lock", ".writer.json"
PATIENCE_S = 2.0
"""How long a job waits for one that is just ending, unless it is told otherwise."""
_POLL_S = 0.05
_SIGNED_S = 1.0
"""How long one that has just taken the directory may need to say who it is."""
_BUSY = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_LONGEST, _SHOWN = 4096, 80
_FOR_DEAD_S = 86400.0
"""A write that has made no file for a day is no longer one."""


class _Held:
    """This process's only descriptor of a ``.lock``, closed when nobody uses it any more."""

    def __init__(self, descriptor: int, real: bool) -> None:
        self.real = real  # whether the kernel keeps other processes out
        self.mutex = threading.RLock()  # one write at a time in this process, which its own lock does not keep out
        weakref.finalize(self, _close, descriptor, os.getpid())


def _close(descriptor: int, process: int) -> None:
    if os.getpid() == process:  # one that was forked may have made something else of the number
        os.close(descriptor)


_HELD: weakref.WeakValueDictionary[tuple[int, int, int], _Held] = weakref.WeakValueDictionary()
"""By process, device and inode of the file: all directories' objects of a process share a lock."""
_TAKING = threading.Lock()


class WriterLock:
    """The right to write into a directory, this process's from the first write to the end of the object or the process.

    Args:
        directory: exists when it is written to.
        wait: seconds to wait for another job that writes there, >= 0; ``math.inf`` for as long as it lives.
    Raises:
        InvalidArgumentError: a bad ``wait``.
    """

    def __init__(self, directory: Path, wait: float) -> None:
        if not isinstance(wait, (int, float)) or isinstance(wait, bool) or math.isnan(wait) or wait < 0:
            raise InvalidArgumentError(f"wait must be a number of seconds >= 0, got {wait!r}.")
        self._directory, self._wait = directory, wait
        self._held: _Held | None = None

    @property
    def token(self) -> str:
        """What stands for this process in names of files; one that was forked has its own."""
        return _token(os.getpid())

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Have the directory, and go on having it afterwards.

        Raises:
            CheckpointError: it is another job's.
            OSError: ``.lock`` cannot be written.
        """
        start = time.monotonic()
        told = False
        while (held := self._take()) is None:
            waited = time.monotonic() - start
            if waited >= self._wait:
                raise self._conflict()
            if waited > PATIENCE_S and not told:
                told = True
                warnings.warn(f"waiting up to {self._wait:g} s: {self._whose()}", stacklevel=4)
            time.sleep(_POLL_S)
        self._held = held
        with held.mutex:
            self.check()
            try:
                yield
            except OSError:
                with contextlib.suppress(OSError):
                    self.check()  # what failed may be another job's doing
                raise

    def check(self) -> None:
        """Look whether another job has taken the directory nevertheless.

        Raises:
            CheckpointError: it has.
        """
        other = self._read()
        if not other:  # removed by hand
            self._sign()
        elif other.get("token") != self.token:
            raise self._conflict()

    def is_dead(self, temporary: Path) -> bool:
        """Whether nobody writes any more what another process began to; call it while ``writing``."""
        if self._held is not None and self._held.real:
            return True
        try:
            return time.time() - temporary.stat().st_mtime > _FOR_DEAD_S
        except OSError:
            return False

    def _take(self) -> _Held | None:
        """This process's hold; None when another process has the lock."""
        with _TAKING:
            file = self._directory / LOCK
            with contextlib.suppress(FileNotFoundError):
                if (held := _HELD.get(_key(file.lstat()))) is not None:
                    return held
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(file, flags, 0o666)
            held = None
            try:
                with contextlib.suppress(OSError):  # another user of the directory must be able to lock it, too
                    os.fchmod(descriptor, stat.S_IMODE(self._directory.stat().st_mode) & 0o666)
                real = self._lock(descriptor)
                if real is not None:
                    self._sign()
                    held = _HELD[_key(os.fstat(descriptor))] = _Held(descriptor, real)
            finally:
                if held is None:
                    os.close(descriptor)
            return held

    def _lock(self, descriptor: int) -> bool | None:
        """Whether the kernel has locked the file; None when it has for another process."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                return None
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"the file system of {self._directory} has no locks ({error.strerror}): when two jobs write there, "
                "the one that came first stops at its next save.",
                stacklevel=6,
            )
            return False
        return True

    def _sign(self) -> None:
        """Say who writes here; whoever reads it sees all of it."""
        me = {"host": socket.gethostname(), "process": os.getpid(), "job": launchers.batch_job(os.environ)}
        temporary = self._directory / f"{WRITER}.{self.token}"
        temporary.write_text(json.dumps({**me, "token": self.token}) + "\n", encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(self._directory / WRITER)

    def _read(self) -> dict[str, Any]:
        """What ``_sign`` wrote; empty where there is no such thing."""
        try:
            descriptor = os.open(self._directory / WRITER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                found = json.loads(file.read(_LONGEST))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _whose(self) -> str:
        deadline = time.monotonic() + _SIGNED_S
        while not self._read() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        said = {name: _plain(value) for name, value in self._read().items() if value}
        job = f", {said['job']}" if "job" in said else ""
        who = f"process {said.get('process', '?')} on {said.get('host', '?')}{job}"
        return f"another job writes checkpoints into {self._directory}: {who}"

    def _conflict(self) -> CheckpointError:
        return CheckpointError(
            f"{self._whose()}; end it, wait for its end (wait=SECONDS; --wait in the examples), or give this job a "
            "directory of its own. To evaluate beside it, restore the model alone."
        )


@functools.cache
def _token(process: int) -> str:  # noqa: ARG001
    return secrets.token_hex(8)


def _key(found: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), found.st_dev, found.st_ino


def _plain(value: Any) -> str:
    return "".join(filter(str.isprintable, str(value)))[:_SHOWN]
