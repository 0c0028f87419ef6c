"""What an environment is made of, and the key by which hosts know that they have the same one."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hvdkit.errors import InvalidArgumentError

MARK = ".hvdkit-stage"
"""A file in a staged environment, with the key of what was unpacked."""
_CACHES = "__pycache__"
_LETTERS = 16


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
