"""Finds the files of a profile, tells what wrote them, and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hvdkit.common import files
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError
from hvdkit.read.mpi_profile import mpip, mpitrace, recorded
from hvdkit.read.mpi_profile.model import HVDKIT, MPIP, MPITRACE, Profile

_READERS = {HVDKIT: recorded.read, MPITRACE: mpitrace.read, MPIP: mpip.read}
_PATTERNS = ("mpi_profile.*", "*.mpiP")


def read(paths: Sequence[Path]) -> Profile:
    """The profile that some files, or the files of a directory, hold.

    Args:
        paths: files of one job and of one format, or directories with such files.
    Raises:
        DataNotFoundError: nothing is there.
        DataError: files of two formats, or of none that is known, or they cannot be read.
        CorruptDataError: a file is damaged.
    """
    found: dict[str, list[tuple[Path, str]]] = {}
    for path in _files(paths):
        text = _text(path)
        found.setdefault(_format(path, text), []).append((path, text))
    if len(found) > 1:
        names = " and ".join(f"{files[0][0]} is of {source}" for source, files in found.items())
        raise DataError(f"These files are of different formats: {names}; give those of one.")
    ((source, files),) = found.items()
    return _READERS[source](files)


def _files(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise DataNotFoundError(f"{path} does not exist; give the directory of --mpi-profile, or files.")
            found.append(path)
            continue
        inside = sorted({file for pattern in _PATTERNS for file in path.glob(pattern) if file.is_file()})
        if not inside:
            raise DataNotFoundError(
                f"{path} holds no MPI profile (mpi_profile.* or *.mpiP): no rank that MPI was started in has written "
                "one; record one with 'hvdkit launch --mpi-profile DIR'."
            )
        found += inside
    return list(dict.fromkeys(found))


def _text(path: Path) -> str:
    try:
        return files.text(path, errors="replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def _format(path: Path, text: str) -> str:
    start = text.lstrip()
    if not start:
        raise CorruptDataError(f"{path} is empty: it was cut off; copy it again, or leave it out.")
    if start.startswith("{"):
        return HVDKIT
    if start.startswith(mpip.HEAD):
        return MPIP
    if mpitrace.HEAD.match(text):
        return MPITRACE
    raise CorruptDataError(
        f"{path} begins with {start[:40].splitlines()[0]!r}: neither a profile of hvdkit, nor of mpitrace ('Data for "
        "MPI rank ...'), nor of mpiP ('@ mpiP')."
    )
