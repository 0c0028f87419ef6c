"""An environment as a stream: packed on one host and unpacked on others as it comes, never a file."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import shutil
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from hvdkit.errors import DataError
from hvdkit.run.launch.stage.environment import Entry

PIECE = 1 << 20
"""Bytes that go through a stream, and over the network, at a time."""
_AT_ONCE = 64 << 10
"""Bytes that are read or written at a time; tarfile copies so many for each header."""
_AHEAD = 64
"""Pieces that may wait for the one who reads."""
_LARGEST_SCRIPT = 1 << 20
_ROOT = PurePosixPath()
_NAME_AFTER_IT = rb"(?![\w.+-])"
_NAME_THE_PREFIX = ("bin/*", "lib*/python*/site-packages/*.pth", "lib*/python*/site-packages/__editable__*.py")
"""Files that may name the environment's own place; scripts in ``bin`` do in their first line."""


class Pieces(io.RawIOBase):
    """A stream from one thread to another; who writes waits when too much has not been read."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.Queue[bytes | Exception] = queue.Queue(_AHEAD)
        self._begun = bytearray()
        self._written = 0
        self._left = memoryview(b"")
        self._end: bytes | Exception | None = None

    def write(self, data: Any) -> int:
        """Add bytes; they can be read by pieces."""
        self._begun += data
        self._written += len(data)
        while len(self._begun) >= PIECE:
            self._queue.put(bytes(self._begun[:PIECE]))
            del self._begun[:PIECE]
        return len(data)

    def tell(self) -> int:
        """Bytes written."""
        return self._written

    def finish(self, error: Exception | None = None) -> None:
        """End the stream; with an error, whoever reads gets it raised."""
        if self._begun and error is None:
            self._queue.put(bytes(self._begun))
        self._queue.put(b"" if error is None else error)

    def read(self, most: int = -1) -> bytes:
        """The next bytes, b"" at the end.

        Args:
            most: how many, -1 for all that is left of a piece.
        """
        if not self._left:
            self._left = memoryview(self._next())
        found = self._left[: most if most >= 0 else None]
        self._left = self._left[len(found) :]
        return bytes(found)

    def drain(self) -> None:
        """Throw away what is left."""
        with contextlib.suppress(Exception):  # of the one who writes, who has it already
            while self._next():
                pass

    def _next(self) -> bytes:
        item = self._queue.get() if self._end is None else self._end
        if isinstance(item, Exception) or not item:
            self._end = item
        if isinstance(item, Exception):
            raise item
        return item


def pack(prefix: Path, found: Iterable[Entry], stream: Pieces) -> None:
    """Write an environment to a stream, without the links that leave it.

    Raises:
        OSError: something cannot be read.
        DataError: it is changed meanwhile.
    """
    with tarfile.TarFile(fileobj=stream, mode="w", copybufsize=_AT_ONCE) as archive:
        for entry in found:
            if entry.leaves:
                continue
            member = tarfile.TarInfo(entry.path)
            member.mode = stat.S_IMODE(entry.mode)
            if stat.S_ISREG(entry.mode):
                member.size, member.mtime = entry.size, entry.mtime_ns // 10**9
                _add(archive, member, prefix / entry.path, entry)
                continue
            member.type = tarfile.DIRTYPE if stat.S_ISDIR(entry.mode) else tarfile.SYMTYPE
            member.linkname = entry.target
            archive.addfile(member)


def _add(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, entry: Entry) -> None:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (entry.size, entry.mtime_ns):
            raise DataError(f"{path} was changed while it was staged; end what installs there, and start again.")
        archive.addfile(member, file)


def unpack(stream: Pieces, root: Path) -> None:
    """Unpack an environment in an empty directory of one's own.

    It holds directories, files and links within it, and nothing else: stricter than ``tarfile.data_filter``, which
    follows the links that it has unpacked.

    Args:
        stream: what ``pack`` wrote.
        root: the directory.
    Raises:
        DataError: the archive is damaged, or has a name or a link that leaves the directory, a device or a hard link.
        OSError: something cannot be written.
    """
    links: set[PurePosixPath] = set()
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_AT_ONCE) as archive:
            for member in archive:
                path = inside(member.name)
                if not links.isdisjoint(path.parents):
                    raise DataError(f"the archive has {member.name!r}, which goes through a link; it was refused.")
                if member.issym():
                    inside(member.linkname, path.parent)
                    links.add(path)
                _make(archive, member, root / path)
    except tarfile.TarError as error:
        raise DataError(f"the archive is damaged ({error}); start again.") from error


def inside(name: str, directory: PurePosixPath = _ROOT) -> PurePosixPath:
    """A path that does not leave the root it is relative to.

    Args:
        name: the path, relative to ``directory``.
        directory: relative to the root; names in it may go up as far as the root.
    Raises:
        DataError: it does leave it.
    """
    path = PurePosixPath(os.path.normpath(directory / name))
    # a/.. may be another place than it looks where a is a link
    if name.startswith("/") or ".." in path.parts or os.path.normpath(name) != name:
        raise DataError(f"the archive has {name!r}, which leaves its directory; it was refused.")
    return path


def _make(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir()
    elif member.issym():
        path.symlink_to(member.linkname)
    elif member.isreg() and (content := archive.extractfile(member)) is not None:
        with path.open("xb", buffering=0) as file:  # one that is there is never written to
            shutil.copyfileobj(content, file, _AT_ONCE)
            os.fchmod(file.fileno(), member.mode & 0o755 | 0o600)
            os.utime(file.fileno(), (member.mtime, member.mtime))
    else:
        raise DataError(f"the archive has {member.name!r}, which is no directory, file or link; it was refused.")


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
        (root / inside(entry.path)).symlink_to(entry.target)


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
            named = b"\0" not in text and place.search(text) is not None
            if named:
                file.write_bytes(place.sub(lambda _: os.fsencode(new), text))
