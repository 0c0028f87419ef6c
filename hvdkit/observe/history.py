"""The history of a run on the root's disk, ``metrics.jsonl``, valid whenever the job is killed.

A line is written at once and whole. A training that begins again from an earlier step, which takes its steps again,
begins a new file with what was before that step, and one that finds damaged lines a file without these; the old file
stays beside it as ``metrics.N.jsonl``.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
NAME = "metrics.jsonl"
_SYNC_S = 5.0
"""A machine that goes down may take so many seconds of the history with it; a job that is killed takes none."""
_COUNTED = ("window", "checkpoint", "end")
"""Kinds of lines that say how far the training was."""


class History:
    """Writes the history of a run; only the root has one. A failure to write is one warning and ends no training.

    Args:
        directory: is made where it is missing.
        version: of hvdkit.
    """

    def __init__(self, directory: Path, version: str) -> None:
        self.path = directory / NAME
        self._version = version
        self._descriptor: int | None = None
        self._columns: list[str] = []
        self._synced = 0.0

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Open the files for a training of which ``step`` steps are done, and say so in them; also once more.

        Args:
            facts: further fields of the line, such as the size of the world.
        """
        self.close()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open(step)
        except OSError as error:
            self._lose(error)
            return
        self.write("start", schema=SCHEMA, hvdkit=self._version, step=step, **facts)

    def _open(self, step: int) -> None:
        """Lock the file and cut off what came after ``step``; with damaged lines begin anew, the old file beside it."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = _lines(self.path)
            while lines and lines[-1][1] is None:  # what a kill cut off goes
                lines.pop()
            valid = [(text, line) for text, line in lines if line is not None]
            kept = [text for text, line in valid if line["kind"] not in _COUNTED or _step(line) <= step]
            if len(kept) == len(lines):
                os.ftruncate(descriptor, sum(map(len, kept)))
            else:
                descriptor = self._begin_again(descriptor, kept)
            if len(valid) < len(lines):
                bad = f"{len(lines) - len(valid)} lines of {self.path} are damaged and left out"
                warnings.warn(f"{bad}; the file as it was stays beside it.", stacklevel=2)
        except Exception:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _begin_again(self, old: int, kept: list[bytes]) -> int:
        """A file with these lines in the place of the old one, which stays beside it."""
        names = (self.path.with_name(f"metrics.{number}.jsonl") for number in itertools.count(1))
        shutil.copyfile(self.path, next(name for name in names if not name.exists()))
        fresh = self.path.with_name(f".{NAME}")
        fresh.write_bytes(b"".join(kept))
        descriptor = os.open(fresh, os.O_RDWR | os.O_APPEND)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fsync(descriptor)
        fresh.replace(self.path)
        os.close(old)
        return descriptor

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line; numbers that are not finite become null."""
        if self._descriptor is None:
            return
        line = _plain({"kind": kind, "time": round(time.time(), 3), **fields})
        try:
            text = f"{json.dumps(line, allow_nan=False)}\n".encode()
            if os.write(self._descriptor, text) < len(text):  # what comes after half a line would not be read
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if kind != "window" or time.monotonic() - self._synced > _SYNC_S:
                os.fsync(self._descriptor)
                self._synced = time.monotonic()
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        """Write no more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lose(self, error: OSError) -> None:
        self.close()
        busy = isinstance(error, BlockingIOError)
        why = "another job writes there" if busy else error.strerror or error
        warnings.warn(f"the history of this run is not kept: {self.path}: {why}; give a directory of its own that can "
                      "be written.", stacklevel=2)  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    """The complete and valid lines of a history; none where there is no file."""
    return [line for _, line in _lines(path) if line is not None]


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Each line as it is and what it says, None where it is damaged."""
    content = path.read_bytes() if path.is_file() else b""
    return [(text, _line(text)) for text in content.splitlines(keepends=True)]


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        line: dict[str, Any] = json.loads(text)
        if not text.endswith(b"\n") or not isinstance(line["kind"], str) or _step(line) < 0:
            return None
        if line["kind"] == "window" and not (isinstance(line["logs"], dict) and _is_of_ranks(line["ranks"])):
            return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return line


def _is_of_ranks(ranks: Any) -> bool:
    """Whether it is numbers by name, None where one is not known."""
    lists = [values for name, values in ranks.items() if name != "quantiles"]
    return all(isinstance(value, int | float | None) for values in lists for value in values)


def _step(line: Mapping[str, Any]) -> int:
    return int(line["step"])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
