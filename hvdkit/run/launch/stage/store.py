"""The directory of one host that staged environments lie in: what is in it, its room, and what nobody uses any more."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hvdkit.common.units import bytes_text
from hvdkit.errors import LaunchError
from hvdkit.run.launch.stage import archive
from hvdkit.run.launch.stage.environment import MARK, Entry, entries, key

_RECENT_S = 3600.0
"""Seconds for a job to start its ranks once its environment is there; until then nobody else removes it."""
_BLOCK = 4096
_SHARED = (
    *("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "panfs", "afs", "dvs", "pvfs"),
    *("weka", "gfs2", "ocfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs"),
)
"""What the names of file systems begin with that hosts share."""
_MOUNTS = Path("/proc/self/mounts")
_PROCESSES = Path("/proc")


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
    kind = file_system(store)
    if kind.startswith(_SHARED):
        raise LaunchError(f"{store} is on {kind}, which hosts share; {where}.")


def file_system(path: Path) -> str:
    """The kind of the file system that a path is on, "" where the kernel does not tell."""
    if not _MOUNTS.exists():
        return ""
    mounts = (line.split() for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines())
    above = {str(path.resolve()), *map(str, path.resolve().parents)}
    covering = [(len(words[1]), number, words[2]) for number, words in enumerate(mounts) if words[1] in above]
    return max(covering)[2] if covering else ""


def has(place: Path) -> bool:
    """Whether a staged environment is there and whole: something that cleans ``/tmp`` may have taken a part.

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
    """Remove what no process of this user uses: environments that no recent job asked for, and what a job left that
    was killed."""
    used = _in_use(store)
    for place in store.iterdir():
        if place.is_symlink() or not place.is_dir():  # somebody else's
            continue
        with contextlib.suppress(FileNotFoundError):  # another job does the same
            recent = time.time() - place.stat().st_mtime < _RECENT_S
            if not recent and place.name not in used and not _is_being_made(place):
                _remove(place)


def _in_use(store: Path) -> set[str]:
    """Names of the environments that processes of this user have in their variables; all where nobody can tell."""
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


def _is_being_made(place: Path) -> bool:
    with _opened(place) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[int]:
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove(place: Path) -> None:
    """Remove an environment that another job must not find half gone."""
    away = Path(tempfile.mkdtemp(dir=place.parent, prefix="gone-"))
    place.rename(away / place.name)
    shutil.rmtree(away)


def need(found: Iterable[Entry]) -> int:
    """Bytes that an environment takes on a disk."""
    return sum(-(-entry.size // _BLOCK) * _BLOCK or _BLOCK for entry in found)


def check_room(store: Path, size: int, files: int) -> None:
    """See whether so many bytes in so many files fit.

    Raises:
        LaunchError: they do not.
    """
    room = os.statvfs(store)
    free = room.f_bavail * room.f_frsize
    if free < size or (room.f_files > 0 and room.f_favail < files):
        raise LaunchError(
            f"the environment takes {bytes_text(size)} in {files} files, and {store.parent} has room for "
            f"{bytes_text(free)} and {room.f_favail} files; give a larger local directory with --stage-dir."
        )


@contextlib.contextmanager
def making(place: Path, prefix: Path) -> Iterator[Path]:
    """A directory to unpack in, which takes its place when the block ends without an error; where another job was
    sooner, that one's stays.

    Args:
        place: where the environment is to lie.
        prefix: where it was made.
    Raises:
        OSError: it cannot be written.
    """
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{place.name}.part-"))
    try:
        with _opened(part) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield part
            archive.move(part, prefix, place)
            (part / MARK).write_text(key(entries(part)), encoding="ascii")
            try:
                part.rename(place)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
    finally:
        if part.exists():
            shutil.rmtree(part)
