"""Keeps what was compiled, one file for each key: locked while it is made, put in place whole, verified when taken.

::

    <XDG cache>/hvdkit/wheels/<key>/       the wheel, and manifest.json with its SHA-256 and what the key was made of
                       mpi_profile/<key>/  the recorder of MPI calls, and its manifest.json
                       sources/            the released source distribution
                       locks/              one file a lock; the kernel frees it when its holder dies
                       logs/               the full output of the latest builds

A sum that lies beside a file says that the file is whole, not whose it is. So nothing is taken, and nothing is written,
where anybody but this user and root could have put it: ``check_owner``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hvdkit.errors import InstallError

LOGS_KEPT = 20
MANIFEST = "manifest.json"


class DamagedError(InstallError):
    """What lies in the cache is not what was put there: it can be made again."""


@dataclass(frozen=True)
class Cache:
    """The cache below ``directory``, which need not exist yet, for one ``kind`` of files.

    Attributes:
        named: the user chose the directory for what lies in it: it may be another's who is trusted with it.
    """

    directory: Path
    kind: str = "wheels"
    named: bool = False

    def get(self, key: str) -> Path | None:
        """The file of a key, None when there is none.

        Raises:
            DamagedError: there is one and it is not what was put there.
            InstallError: others could have put it there.
        """
        entry = self.entry(key)
        self._check_owners(entry.parent, entry, entry / MANIFEST)
        try:
            manifest: Any = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
            file = entry / Path(manifest["file"] if "file" in manifest else manifest["wheel"]).name
            expected = manifest["sha256"]
            found = sha256(file)
        except FileNotFoundError as error:
            if not entry.exists():
                return None
            raise DamagedError(f"The cached {entry} is incomplete ({error.filename} is missing).") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"The cached {entry} cannot be read ({error}).") from error
        check_owner(file, self.named)
        if found != expected:
            raise DamagedError(f"The cached {file} has SHA-256 {found}, expected {expected}.")
        return file

    def whole(self, key: str, say: Callable[[str], None]) -> Path | None:
        """The file of a key; ``say`` is told of one that is damaged, which is forgotten."""
        try:
            return self.get(key)
        except DamagedError as error:
            say(f"{error} It is made again.")
            self.drop(key)
            return None

    def put(self, key: str, file: Path, fields: Mapping[str, Any]) -> Path:
        """Keep a file under a key in place of any other; it is there whole or not at all. Hold the key's lock.

        Returns:
            The path of the file in the cache.
        Raises:
            InstallError: it cannot be written there, such as for want of space.
        """
        entry = self.entry(key)
        new = entry.with_name(f".new-{key}")
        try:
            self.room(self.kind)
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(0o755)
            shutil.copyfile(file, new / file.name)
            manifest = {"file": file.name, "sha256": sha256(file), "key": dict(fields)}
            (new / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            for written in new.iterdir():
                written.chmod(0o644)  # a umask of 002 would let the group write
                with written.open("rb") as opened:
                    os.fsync(opened.fileno())
            self.drop(key)
            new.rename(entry)
        except OSError as error:
            raise InstallError(
                f"{file.name} cannot be kept in {entry.parent}: {error.strerror}; make room there, or "
                f"{'name' if self.named else 'set XDG_CACHE_HOME to'} another directory."
            ) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return entry / file.name

    def drop(self, key: str) -> None:
        """Forget the file of a key, if there is one."""
        entry = self.entry(key)
        if entry.exists():
            shutil.rmtree(entry)

    def new_log(self, key: str) -> Path:
        """Path of a log that does not exist yet; the oldest of many are removed."""
        logs = self.room("logs")
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
        path = self.room("locks") / f"{name}.lock"
        with path.open("a+", encoding="utf-8") as file:
            _lock(file, waiting)
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def entry(self, key: str) -> Path:
        """The directory of a key, which need not exist."""
        return self.directory / self.kind / key

    def room(self, name: str) -> Path:
        """A directory of the cache to write to, made unless it is there.

        Raises:
            InstallError: others can write there too.
        """
        room = self.directory / name
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self.directory, room):
            directory.mkdir(0o755, exist_ok=True)
        self._check_owners(room)
        return room

    def _check_owners(self, *paths: Path) -> None:
        above = self.directory.parent
        found = _status(above)
        if found is not None and found.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise InstallError(
                f"Anybody can write to {above} and it has no sticky bit, so that others can put a cache of theirs in "
                f"place of {self.directory.name}: 'chmod +t {above}', or set XDG_CACHE_HOME to a directory of your own."
            )
        for path in (self.directory, *paths):
            check_owner(path, self.named)


def check_owner(path: Path, named: bool = False) -> None:
    """Refuse what anybody but this user and root, or the owner of a directory that the user named, can have written.

    The sticky bit does not help here: whoever comes first would choose what is under a name. Write permissions of
    access control lists show in the mode as the group's (acl(5)).

    Raises:
        InstallError: it is another's, or group or others may write; what is not there is no error.
    """
    found = _status(path)
    if found is None:
        return
    mode, theirs = stat.S_IMODE(found.st_mode), not named and found.st_uid not in (0, os.geteuid())
    if not theirs and not mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = "no known user"
    fix = "remove it" if theirs else f"'chmod -R go-w {path}' if you trust all that is in it"
    raise InstallError(
        f"{path} belongs to {owner} (uid {found.st_uid}) and has mode {mode:04o}; expected "
        f"{'' if named else 'you or root as its owner and '}no write permission for others, who could have put there "
        f"what hvdkit would run: {fix}, or {'name' if named else 'set XDG_CACHE_HOME to'} a directory of your own."
    )


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


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
