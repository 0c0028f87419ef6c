"""Keeps finished wheels, one for each key: locked while it is made, put in place whole, verified when taken.

::

    <XDG cache>/hvdkit/wheels/<key>/   the wheel, and manifest.json with its SHA-256 and what the key was made of
                       sources/        the released source distribution
                       locks/          one file a lock; the kernel frees it when its holder dies
                       logs/           the full output of the latest builds
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hvdkit.errors import InstallError

LOGS_KEPT = 20
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Cache:
    """The cache below ``directory``, which need not exist yet."""

    directory: Path

    @property
    def sources(self) -> Path:
        """Directory of the downloaded source distribution."""
        return self.directory / "sources"

    def has(self, key: str) -> bool:
        """Whether there is a wheel for a key, not verified."""
        return (self._entry(key) / MANIFEST).is_file()

    def get(self, key: str) -> Path | None:
        """The wheel of a key, None when there is none.

        Raises:
            InstallError: there is one and it is not what was put there.
        """
        entry = self._entry(key)
        try:
            manifest: Any = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
            wheel = entry / Path(manifest["wheel"]).name
            expected = manifest["sha256"]
            found = sha256(wheel)
        except FileNotFoundError as error:
            if not entry.exists():
                return None
            raise InstallError(f"The cached wheel {entry} is incomplete ({error.filename} is missing).") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InstallError(f"The cached wheel {entry} cannot be read ({error}).") from error
        if found != expected:
            raise InstallError(f"The cached wheel {wheel} has SHA-256 {found}, expected {expected}.")
        return wheel

    def put(self, key: str, wheel: Path, fields: Mapping[str, Any]) -> Path:
        """Keep a wheel under a key in place of any other; it is there whole or not at all. Hold the key's lock.

        Returns:
            The path of the wheel in the cache.
        """
        entry = self._entry(key)
        entry.parent.mkdir(parents=True, exist_ok=True)
        new = entry.with_name(f".new-{key}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        shutil.copyfile(wheel, new / wheel.name)
        manifest = {"wheel": wheel.name, "sha256": sha256(wheel), "key": dict(fields)}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for file in new.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        self.drop(key)
        new.rename(entry)
        return entry / wheel.name

    def drop(self, key: str) -> None:
        """Forget the wheel of a key, if there is one."""
        entry = self._entry(key)
        if entry.exists():
            shutil.rmtree(entry)

    def new_log(self, key: str) -> Path:
        """Path of a log that does not exist yet; the oldest of many are removed."""
        logs = self.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for old in sorted(logs.glob("*.log"))[: -LOGS_KEPT + 1]:
            old.unlink(missing_ok=True)
        return logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{key[:12]}-{os.getpid()}.log"

    @contextlib.contextmanager
    def locked(self, name: str, waiting: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock called ``name``; other processes that ask for it wait.

        Args:
            name: a key, or any other word that can be a file name.
            waiting: called once, with who holds the lock, when it is not free.
        """
        path = self.directory / "locks" / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8") as file:
            _lock(file, waiting)
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def _entry(self, key: str) -> Path:
        return self.directory / "wheels" / key


def sha256(file: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _lock(file: IO[str], waiting: Callable[[str], None]) -> None:
    """Take the lock on an open file. The kernel gives it back when the file is closed, also by a kill."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        waiting(file.read().strip() or "another process")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise InstallError(
            f"The file system of {file.name} has no locks ({error.strerror}): set XDG_CACHE_HOME to a directory "
            "on another one."
        ) from error
