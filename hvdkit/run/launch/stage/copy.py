"""An environment and its copy on a host: what it is made of, packed and unpacked as a stream, and where copies lie."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from hvdkit.errors import DataError, InvalidArgumentError, LaunchError

MARK = ".hvdkit-stage"
"""A file in a copy, with the key of what was unpacked."""
PIECE = 1 << 20
"""Bytes that are packed, or go over the network, at a time."""
_CACHES, _LETTERS = "__pycache__", 16
_LARGEST_SCRIPT = 1 << 20
_NAME_AFTER_IT = rb"(?![\w.+-])"
_NAME_THE_PREFIX = ("bin/*", "lib*/python*/site-packages/*.pth", "lib*/python*/site-packages/__editable__*.py")
"""Files that may name the environment's own place; scripts in ``bin`` do in their first line."""
_RECENT_S = 3600.0
"""Seconds for a job to start its ranks once its environment is there; until then nobody else removes it."""
_SHARED = (
    *("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "panfs", "afs", "dvs", "pvfs"),
    *("weka", "gfs2", "ocfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs"),
)
"""What the names of file systems begin with that hosts share."""
_MOUNTS, _PROCESSES = Path("/proc/self/mounts"), Path("/proc")


# What an environment is made of


class Entry(NamedTuple):
    """A directory, file or link of an environment.

    Attributes:
        path: relative to the environment.
        mode: as ``os.stat`` has it.
        size: bytes, 0 for all but files.
        mtime_ns: 0 for all but files.
        target: of a link, relative for one within the environment, absolute for one that leaves it; "" for no link.
    """

    path: str
    mode: int
    size: int = 0
    mtime_ns: int = 0
    target: str = ""

    @property
    def leaves(self) -> bool:
        """It is a link to a place outside of the environment, such as that to a venv's base interpreter."""
        return self.target.startswith("/")


def active() -> Path:
    """The environment of this Python: a venv, or a conda environment.

    Raises:
        InvalidArgumentError: it is in neither.
    """
    prefix = Path(sys.prefix)
    if not ((prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()):
        raise InvalidArgumentError(
            f"--stage copies a virtual or conda environment, and {sys.executable} is in neither; install hvdkit in "
            "one, or leave --stage out."
        )
    return prefix


def entries(prefix: Path) -> list[Entry]:
    """All that an environment holds, by name. Links out of it are kept in ``bin`` and where they lead to directories;
    others stand for the file that they lead to.

    Raises:
        OSError: something cannot be read.
    """
    found, pending = [], [""]
    while pending:
        inside = pending.pop()
        with os.scandir(prefix / inside) as items:
            for item in items:
                path = inside + item.name
                entry = None if path == MARK else _entry(prefix, path, item)
                if entry is None:
                    continue
                found.append(entry)
                if stat.S_ISDIR(entry.mode):
                    pending.append(f"{path}/")
    return sorted(found)


def _entry(prefix: Path, path: str, item: os.DirEntry[str]) -> Entry | None:
    """None for what an environment needs not: a socket, a pipe, or a link out of it to nothing."""
    status = item.stat(follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        link = Path(item.path)
        target = Path(os.path.normpath(link.parent / link.readlink()))
        if target.is_relative_to(prefix):
            return Entry(path, status.st_mode, target=os.path.relpath(target, link.parent))
        if not target.exists():
            return None
        if target.is_dir() or path.startswith("bin/"):
            return Entry(path, status.st_mode, target=str(target))
        status = item.stat()
    if stat.S_ISREG(status.st_mode):
        return Entry(path, status.st_mode, status.st_size, status.st_mtime_ns)
    return Entry(path, status.st_mode) if stat.S_ISDIR(status.st_mode) else None


def key(found: Iterable[Entry], *more: str) -> str:
    """The key of an environment: names, modes, sizes, times and links, without what Python compiles as it imports.

    Args:
        found: by name.
        more: what else makes a difference.
    """
    digest = hashlib.sha256(repr(more).encode())
    for entry in found:
        if _CACHES not in entry.path:
            digest.update(repr(tuple(entry)).encode())
    return digest.hexdigest()[:_LETTERS]


def editable() -> list[str]:
    """Names of the ``.pth`` files of this Python's packages that lie elsewhere: an editable install writes one."""
    names = []
    for file in sorted(Path(sysconfig.get_path("purelib")).glob("*.pth")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        outside = (line.startswith("/") and not line.startswith(f"{sys.prefix}/") for line in lines)
        if file.name.startswith("__editable__") or any(outside):
            names.append(file.name)
    return names


# As a stream, which never is a file


def pack(prefix: Path, found: Iterable[Entry], stream: IO[bytes]) -> None:
    """Write an environment to a stream, without the links that leave it.

    Raises:
        OSError: something cannot be read.
        DataError: it is changed meanwhile.
    """
    with tarfile.open(fileobj=stream, mode="w|", bufsize=PIECE) as archive:
        for entry in found:
            if entry.leaves:
                continue
            member = tarfile.TarInfo(entry.path)
            member.mode = stat.S_IMODE(entry.mode)
            if not stat.S_ISREG(entry.mode):
                member.type = tarfile.DIRTYPE if stat.S_ISDIR(entry.mode) else tarfile.SYMTYPE
                member.linkname = entry.target
                archive.addfile(member)
                continue
            member.size, member.mtime = entry.size, entry.mtime_ns // 10**9
            with (prefix / entry.path).open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_size, status.st_mtime_ns) != (entry.size, entry.mtime_ns):
                    raise DataError(
                        f"{prefix / entry.path} was changed while it was staged; end what installs there, and start "
                        "again."
                    )
                archive.addfile(member, file)


def unpack(stream: Any, root: Path) -> None:
    """Unpack an environment in an empty directory of one's own: nothing that leaves it, no device, no set-user-id.

    Args:
        stream: what ``pack`` wrote.
        root: the directory.
    Raises:
        DataError: the archive is damaged, or has what ``tarfile.data_filter`` refuses.
        OSError: something cannot be written.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(root, filter="data")
    except tarfile.FilterError as error:
        raise DataError(f"the archive was refused: {error}.") from error
    except tarfile.TarError as error:
        raise DataError(f"the archive is damaged ({error}); start again.") from error


def link_out(found: Iterable[Entry], root: Path) -> None:
    """Make the links that leave an environment, which no archive may hold.

    Raises:
        DataError: what one leads to is not on this host.
    """
    for entry in found:
        if not Path(entry.target).exists():
            raise DataError(
                f"there is no {entry.target}, which {entry.path} of the environment leads to; install it here, or "
                "leave this host out."
            )
        (root / entry.path).symlink_to(entry.target)


def move(root: Path, old: Path, new: Path) -> None:
    """Have scripts and ``.pth`` files say where the environment is to lie.

    Args:
        root: where its files lie now.
        old: where it was made.
        new: what they are to name instead.
    """
    place = re.compile(re.escape(os.fsencode(old)) + _NAME_AFTER_IT)
    for pattern in _NAME_THE_PREFIX:
        for file in root.glob(pattern):
            if file.is_symlink() or not file.is_file() or file.stat().st_size > _LARGEST_SCRIPT:
                continue
            text = file.read_bytes()
            if b"\0" not in text and place.search(text) is not None:
                file.write_bytes(place.sub(lambda _: os.fsencode(new), text))


# The directory of a host that copies lie in


def prepare(store: Path) -> None:
    """Make the directory, unless it is there.

    Raises:
        LaunchError: it cannot be made, is not this user's alone, or on a file system that hosts share.
    """
    where = "give a directory on the host's own disk with --stage-dir"
    try:
        with contextlib.suppress(FileExistsError):
            store.mkdir(mode=0o700)
        status = store.lstat()
    except OSError as error:
        raise LaunchError(f"{store} cannot be made ({error.strerror}); {where}.") from error
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or status.st_mode & 0o077 or not os.access(store, os.W_OK | os.X_OK):
        raise LaunchError(f"{store} is not a directory of this user alone that can be written; remove it, or {where}.")
    if not _MOUNTS.exists():
        return
    mounts = (line.split() for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines())
    above = {str(store.resolve()), *map(str, store.resolve().parents)}
    covering = [(len(words[1]), number, words[2]) for number, words in enumerate(mounts) if words[1] in above]
    kind = max(covering)[2] if covering else ""
    if kind.startswith(_SHARED):
        raise LaunchError(f"{store} is on {kind}, which hosts share; {where}.")


def has(place: Path) -> bool:
    """Whether a copy is there and whole: something that cleans ``/tmp`` may have taken a part.

    One that is not whole is removed.

    Raises:
        LaunchError: it is not whole, and a process uses it.
    """
    if not place.exists():
        return False
    mark = place / MARK
    if mark.exists() and mark.read_text(encoding="ascii", errors="replace") == key(entries(place)):
        os.utime(place)
        return True
    if place.name in _in_use(place.parent):
        raise LaunchError(f"{place} was changed since it was staged, and a process uses it; end that one first.")
    _remove(place)
    return False


def clean(store: Path) -> None:
    """Remove what no process of this user uses: copies that no recent job asked for, and what a killed job left."""
    used = _in_use(store)
    for place in store.iterdir():
        if place.is_symlink() or not place.is_dir():  # somebody else's
            continue
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another job does the same, or makes it
            if place.name in used or time.time() - place.stat().st_mtime < _RECENT_S:
                continue
            with _locked(place):
                _remove(place)


def _in_use(store: Path) -> set[str]:
    """Names of the copies that processes of this user have in their variables; all where nobody can tell."""
    if not (_PROCESSES / "self/environ").exists():
        return {place.name for place in store.iterdir()}
    found: set[str] = set()
    for process in _PROCESSES.glob("[0-9]*"):
        try:
            variables = os.fsdecode((process / "environ").read_bytes())
        except OSError:  # ended, or another user's
            continue
        found.update(part.partition("/")[0] for part in variables.split(f"{store}/")[1:])
    return {name.partition(":")[0].partition("\0")[0] for name in found}


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold a directory; BlockingIOError where another process does."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove(place: Path) -> None:
    """Remove a copy that another job must not find half gone."""
    away = Path(tempfile.mkdtemp(dir=place.parent, prefix="gone-"))
    place.rename(away / place.name)
    shutil.rmtree(away)


@contextlib.contextmanager
def making(place: Path, prefix: Path) -> Iterator[Path]:
    """A directory to unpack in, which takes its place when the block ends without an error; where another job was
    sooner, that one's stays.

    Args:
        place: where the copy is to lie.
        prefix: where the environment was made.
    Raises:
        OSError: it cannot be written.
    """
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{place.name}.part-"))
    try:
        with _locked(part):
            yield part
            move(part, prefix, place)
            (part / MARK).write_text(key(entries(part)), encoding="ascii")
            try:
                part.rename(place)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
    finally:
        if part.exists():
            shutil.rmtree(part)
