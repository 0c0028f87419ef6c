"""The history of a run on the root's disk, ``metrics.jsonl``, valid whenever the job is killed.

Lines are only added, each at once and whole. A training that begins again from an earlier step adds its ``start`` line
with that step: what was later before it is void, and readers leave it out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 2
"""In the first, a training that went back had cut the file; such a file is read as it is."""
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
        self._synced = 0.0

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Open the file for a training of which ``step`` steps are done, and say so in it; also once more.

        Args:
            facts: further fields of the line, such as the size of the world.
        """
        self.close()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = _lines(self.path)
            while lines and lines[-1][1] is None:  # what a kill cut off goes
                lines.pop()
            os.ftruncate(self._descriptor, sum(len(text) for text, _ in lines))
        except OSError as error:
            self._lose(error)
        self.write("start", schema=SCHEMA, hvdkit=self._version, step=step, **facts)

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
        why = "another job writes there" if isinstance(error, BlockingIOError) else error.strerror or error
        fix = "give a directory of its own that can be written"
        warnings.warn(f"the history of this run is not kept: {self.path}: {why}; {fix}.", stacklevel=2)


def read(path: Path) -> list[dict[str, Any]]:
    """The complete and valid lines of a history, without what a later start makes void; none where there is no file."""
    found: list[dict[str, Any]] = []
    for _, line in _lines(path):
        if line is not None and line["kind"] == "start":
            found = [one for one in found if one["kind"] not in _COUNTED or one["step"] <= line["step"]]
        found += [] if line is None else [line]
    return found


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Each line as it is and what it says, None where it is damaged."""
    content = path.read_bytes() if path.is_file() else b""
    return [(text, _line(text)) for text in content.splitlines(keepends=True)]


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        line: dict[str, Any] = json.loads(text)
        if not text.endswith(b"\n") or not isinstance(line["kind"], str):
            return None
        if type(line["step"]) is not int or line["step"] < 0:
            return None
        if line["kind"] == "window":
            columns = [column for name, column in line["ranks"].items() if name != "quantiles"]
            known = all(isinstance(value, int | float | None) for column in columns for value in column)
            return line if known and isinstance(line["logs"], dict) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return line


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
