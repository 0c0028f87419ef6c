"""The directory that a recorder in the ranks writes to: made before the job, and what is new in it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import InvalidArgumentError


def prepare(option: str, directory: Path, pattern: str) -> dict[Path, int]:
    """Make the directory, unless it is there; the files of the pattern that it holds before the job, with their times.

    Raises:
        InvalidArgumentError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} {directory} cannot be made a directory: {error.strerror}; give another path."
        ) from error
    return _files(directory, pattern)


def new(directory: Path, pattern: str, before: Mapping[Path, int]) -> list[Path]:
    """The files that the job wrote: those that ``prepare`` did not find, or found older."""
    return [file for file, time in _files(directory, pattern).items() if before.get(file) != time]


def _files(directory: Path, pattern: str) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in directory.glob(pattern)}
