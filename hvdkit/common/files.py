"""Files that the tools write: complete or not at all, never over what they read.

Why this room exists: every tool that writes a file keeps an old one whole until the new one is complete.
"""

from __future__ import annotations

import gzip
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, cast

from hvdkit.errors import DataError, InvalidArgumentError


def exists(path: Path) -> bool:
    """Whether something is at a path; False where nothing can be, such as for a name too long, which pathlib raises."""
    return _mode(path) != 0


def is_file(path: Path) -> bool:
    """Whether an ordinary file is at a path; False where nothing can be."""
    return stat.S_ISREG(_mode(path))


def is_directory(path: Path) -> bool:
    """Whether a directory is at a path; False where nothing can be."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


@contextmanager
def replacing(path: Path, *sources: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of ``path`` when the block ends without an error; zipped for a .gz.

    Args:
        path: of the file to make.
        sources: what is read meanwhile, which ``path`` must not be.
    Raises:
        InvalidArgumentError: path is one of the sources, or no ordinary file.
        DataError: it cannot be written.
    """
    if is_directory(path):
        raise InvalidArgumentError(f"the output {str(path)!r} is a directory; give the name of a file.")
    if exists(path) and not is_file(path):
        raise InvalidArgumentError(f"the output {str(path)!r} is no ordinary file; give the name of one.")
    for source in sources:
        if exists(path) and exists(source) and path.samefile(source):
            raise InvalidArgumentError(f"the output {str(path)!r} is the input; give another name.")
    with ExitStack() as stack:
        try:
            number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        except OSError as error:
            raise DataError(
                f"cannot write {str(path)!r} ({error.strerror}); give a path that can be written."
            ) from error
        temporary = Path(name)
        stack.callback(temporary.unlink, missing_ok=True)
        with os.fdopen(number, "wb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=6) as zipped:
                    yield cast(IO[bytes], zipped)
            else:
                yield file
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
