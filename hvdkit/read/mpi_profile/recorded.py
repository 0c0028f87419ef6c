"""Reads mpi_profile.RANK.json, the files of ``hvdkit launch --mpi-profile``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import CorruptDataError
from hvdkit.read.mpi_profile.model import HVDKIT, Calls, Profile, Rank

MARK = "mpi profile"
_MOST = 2**64
"""The recorder counts in 64 bits."""
_STATES = ("finalized", "exited", "aborted", "running")


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    job: str
    size: int
    rank: Rank
    library: str
    lost: int


def read(files: Sequence[tuple[Path, str]]) -> Profile:
    """The profile of a job.

    Args:
        files: paths and contents, of one job or, after another one wrote into the same directory, of several: the
            newest is read.
    Raises:
        CorruptDataError: a file is cut off or holds what cannot be.
    """
    found = [_read_one(path, text) for path, text in files]
    newest = max(found, key=lambda file: file.path.stat().st_mtime_ns if file.path.exists() else 0)
    of_job = sorted((file for file in found if file.job == newest.job), key=lambda file: file.rank.rank)
    numbers = [file.rank.rank for file in of_job]
    for first, second in itertools.pairwise(of_job):
        if first.rank.rank == second.rank.rank:
            raise CorruptDataError(
                f"Rank {first.rank.rank} is in two files, {first.path} and {second.path}; give each rank once."
            )
    if any(file.size != newest.size for file in of_job) or numbers[-1] >= newest.size:
        raise CorruptDataError(f"The files beside {newest.path} disagree about the number of ranks; record again.")
    return Profile(
        source=HVDKIT,
        size=newest.size,
        ranks=tuple(file.rank for file in of_job),
        mpi_seconds={file.rank.rank: file.rank.mpi_seconds for file in of_job},
        notes=tuple(_notes(of_job, len(found) - len(of_job))),
        library=newest.library,
    )


def _notes(files: Sequence[_File], older: int) -> list[str]:
    notes = []
    if older:
        notes.append(f"{older} {'file' if older == 1 else 'files'} of an earlier job in the same directory left out.")
    for state, what in (
        ("running", "was killed, or still ran: its record ends up to a minute before its end"),
        ("exited", "ended without MPI_Finalize"),
        ("aborted", "called MPI_Abort"),
    ):
        ranks = [str(file.rank.rank) for file in files if file.rank.state == state]
        if ranks:
            notes.append(f"{'Rank' if len(ranks) == 1 else 'Each of ranks'} {', '.join(ranks)} {what}.")
    lost = sum(file.lost for file in files)
    if lost:
        notes.append(f"{lost} calls were not recorded: more than 512 kinds of calls on a rank.")
    return notes


def _read_one(path: Path, text: str) -> _File:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise CorruptDataError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}); the file is damaged or cut off: copy it again, or "
            "leave it out."
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise CorruptDataError(f"{path} is no MPI profile: no program can read this JSON ({error}).") from error
    if not isinstance(content, dict) or content.get("hvdkit") != MARK or content.get("version") != 1:
        raise CorruptDataError(f"{path} is JSON, but no MPI profile of 'hvdkit launch --mpi-profile' (version 1).")
    take = _Taker(path)
    rows = [
        row
        for group in take.list(content, "calls")
        for row in _rows(take, group, measured=content.get("wait_measured") is True)
    ]
    state = take.text(content, "state")
    if state not in _STATES:
        raise take.wrong("state", state, f"one of {', '.join(_STATES)}")
    rank = Rank(take.whole(content, "rank"), take.number(content, "seconds"), tuple(rows), state)
    return _File(
        path,
        take.text(content, "job"),
        take.whole(content, "size", 1),
        rank,
        take.text(content, "library"),
        take.whole(content, "lost"),
    )


def _rows(take: _Taker, group: Any, *, measured: bool) -> list[Calls]:
    if not isinstance(group, dict):
        raise take.wrong("calls", group, "an object")
    routine = take.text(group, "routine")
    if not (routine.startswith("MPI_") and routine.replace("_", "").isalnum()):
        raise take.wrong("routine", routine, "the name of an MPI function")
    rows = []
    for row in take.list(group, "bins"):
        if not isinstance(row, dict):
            raise take.wrong("bins", row, "an object")
        one = Calls(
            routine=routine,
            calls=take.whole(row, "calls", 1),
            seconds=take.number(row, "seconds"),
            bytes=take.whole(row, "bytes"),
            least_bytes=take.whole(row, "least_bytes"),
            most_bytes=take.whole(row, "most_bytes"),
            fastest_s=take.number(row, "least_seconds"),
            slowest_s=take.number(row, "most_seconds"),
            wait_s=take.number(row, "wait_seconds") if measured else None,
            processes=take.whole(group, "processes") or None,
            caller=take.text(group, "caller"),
            op=take.text(group, "op"),
            datatype=take.text(group, "type"),
        )
        least, most = one.least_bytes or 0, one.most_bytes or 0
        if not least <= (one.average_bytes or 0) <= most:
            raise take.wrong(f"bytes of {routine}", one.bytes, f"{one.calls} calls of {least:g} to {most:g}")
        rows.append(one)
    return rows


class _Taker:
    """Takes a value of the right kind out of an object, or says what is wrong with the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def wrong(self, name: str, value: object, expected: str) -> CorruptDataError:
        """The error for a value."""
        return CorruptDataError(
            f"{self._path}: {name} is {str(value)[:60]!r}, expected {expected}; the file is damaged: copy it again, or "
            "leave it out."
        )

    def list(self, values: dict[str, Any], name: str) -> list[Any]:
        """A list."""
        value = values.get(name)
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def text(self, values: dict[str, Any], name: str) -> str:
        """A text."""
        value = values.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def whole(self, values: dict[str, Any], name: str, least: int = 0) -> int:
        """A whole number from ``least`` on."""
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
            raise self.wrong(name, value, f"a whole number from {least} on")
        return value

    def number(self, values: dict[str, Any], name: str) -> float:
        """A finite number from 0 on."""
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
            raise self.wrong(name, value, "a number from 0 on")
        return float(value)
