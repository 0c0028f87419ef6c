"""Files that the tools read and write: read if they are ordinary files that fit, written whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

from hvdkit.errors import DataError, InvalidArgumentError

MOST_BYTES = 1 << 28
"""Of a file that is read as a whole, unpacked; several times that is used to decode it."""
GZIP_MAGIC = b"\x1f\x8b"


def opened(path: Path) -> BinaryIO:
    """A file to read from, which is an ordinary one: a device may never end, a pipe never begin.

    Raises:
        OSError: it is none, or cannot be opened; its ``strerror`` is part of a sentence.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else opening a pipe waits for one who writes
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(number, "rb")
    os.close(number)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file", str(path))


def content(path: Path, *, most: int = MOST_BYTES, unzip: bool = False) -> bytes:
    """All that an ordinary file holds.

    Args:
        path: the file.
        most: bytes that it may have, also unpacked.
        unzip: unpack it if it begins as a gzip file does, whatever its name.
    Raises:
        OSError: it cannot be read, or has more; its ``strerror`` is part of a sentence.
        EOFError, zlib.error: what is packed is cut off or damaged; gzip.BadGzipFile is an OSError.
    """
    with opened(path) as file, ExitStack() as stack:
        size = os.fstat(file.fileno()).st_size
        stream: IO[bytes] = file
        if unzip and file.read(len(GZIP_MAGIC)) == GZIP_MAGIC:
            size = 0
            stream = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=file)))
        file.seek(0)
        try:
            found = stream.read(most + 1) if size <= most else b""
        except MemoryError as error:
            raise OSError(errno.ENOMEM, "it does not fit into memory", str(path)) from error
        if size > most or len(found) > most:
            raise OSError(errno.EFBIG, f"it holds more than {most >> 20} MiB", str(path))
        return found


def text(path: Path, *, errors: str = "strict") -> str:
    """The same as text; UnicodeDecodeError where it is in another encoding."""
    return content(path).decode(errors=errors)


def text_if_there(path: Path) -> str:
    """The text of a small file of the system or of a package; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Whether something is at a path, of any kind or of this; False where nothing can be, such as for a name too long, for
# which pathlib raises.
exists, is_file, is_directory = os.path.exists, os.path.isfile, os.path.isdir


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
            file = stack.enter_context(complete_or_absent(path))
        except OSError as error:
            raise DataError(
                f"cannot write {str(path)!r} ({error.strerror}); give a path that can be written."
            ) from error
        if path.suffix == ".gz":
            zipped = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=6)
            yield stack.enter_context(cast(IO[bytes], zipped))
        else:
            yield file


@contextmanager
def complete_or_absent(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, beside ``path`` with a name that nobody can guess, which takes its place at the end.

    Nothing of it stays where the block ends with an error, and nothing that lies at ``path`` is written to: a symbolic
    link there is replaced.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)
            Path(file.name).replace(path)
        finally:
            Path(file.name).unlink(missing_ok=True)
