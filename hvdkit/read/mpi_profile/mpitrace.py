"""Reads IBM mpitrace's text files ``mpi_profile.N``, of some ranks or of all.

mpitrace keeps the files of rank 0 and of the ranks with the least, the median and the most time in MPI, unless
SAVE_ALL_TASKS=yes is set; that of rank 0 tells the times of all. Its numbers are rounded: bytes to a tenth per call,
seconds to a millisecond.

Source: its output, and ``summary.c`` of its published source (mpitrace, IBM).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hvdkit.errors import CorruptDataError
from hvdkit.read.mpi_profile.model import MPITRACE, Calls, Profile, RankProfile, of_ranks

HEAD = re.compile(r"^Data for MPI rank (\d{1,7}) of (\d{1,7}):")
_NUMBER = r"(\d{1,18}(?:\.\d+)?)"
_ROW = re.compile(rf"(MPI_\w+)?\s+(\d{{1,18}})\s+{_NUMBER}\s+{_NUMBER}\s*")
"""Calls, average bytes and seconds: of a routine, or below its heading of a size."""
_SIZES_OF = re.compile(r"\s*(MPI_\w+)\s+#calls\s+avg\. bytes\s+time\(sec\)\s*")
_ELAPSED = re.compile(r"total elapsed time\s*=\s*(\S+) seconds")
_SECONDS = re.compile(_NUMBER)
_RANK = re.compile(r"\d{1,7}")
_SIZES_BEGIN = "Message size distributions:"
_SIZES_END = ("Summary for on-node", "Call Graph Section", "Communication summary", "MPI timing summary")


def read(files: Sequence[tuple[Path, str]]) -> Profile:
    """The profile of a job.

    Args:
        files: paths and contents, of one job.
    Raises:
        CorruptDataError: a file is cut off, its parts disagree, or the files are of different jobs.
    """
    found = [_read_one(path, text) for path, text in files]
    times = {number: seconds for *_, of_all in found for number, seconds in of_all.items()}
    note = "mpitrace rounds bytes to a tenth per call and seconds to a millisecond."
    return of_ranks(MPITRACE, [(path, size, rank) for path, size, rank, _ in found], times, (note,))


def _read_one(path: Path, text: str) -> tuple[Path, int, RankProfile, dict[int, float]]:
    """One rank's file: number of ranks, the rank with its calls, and in that of rank 0 the seconds of all in MPI."""
    lines = text.splitlines()
    head = HEAD.match(lines[0]) if lines else None
    if head is None or int(head[1]) >= int(head[2]):
        raise CorruptDataError(f"{path}, line 1: expected 'Data for MPI rank N of M:', as mpitrace writes it.")
    routines: dict[str, list[Calls]] = {}
    sizes: dict[str, list[Calls]] = {}
    times: dict[int, float] = {}
    elapsed, table, routine, column = "", "routines", "", 0
    begun = False
    for number, line in enumerate(lines, start=1):
        words = line.split()
        row = _ROW.fullmatch(line)
        if line.startswith("total communication time"):
            table = ""
        elif line.startswith(_SIZES_BEGIN):
            table, begun = "sizes", True
        elif table == "sizes" and line.startswith(_SIZES_END):
            table = ""
        elif "taskid" in words and "comm(s)" in words:
            table, column = "tasks", words.index("comm(s)")
        elif table == "tasks":
            if words and _RANK.fullmatch(words[0]) and len(words) > column:
                times[int(words[0])] = _seconds(path, words[column])
            else:
                table = ""
        elif table == "routines" and row and row[1]:
            routines[row[1]] = _calls(row[1], row)
        elif table == "routines" and line.startswith("MPI_") and not line.startswith("MPI_Routine"):
            raise CorruptDataError(
                f"{path}, line {number}: expected a routine with calls, bytes and seconds, got {line[:60]!r}."
            )
        elif table == "sizes" and (heading := _SIZES_OF.fullmatch(line)):
            routine = heading[1]
            sizes[routine] = []
        elif table == "sizes" and routine and row and not row[1]:
            sizes[routine] += _calls(routine, row)
        elif not elapsed and (match := _ELAPSED.match(line)):
            elapsed = match[1]
    if not elapsed or not begun:
        raise CorruptDataError(f"{path} is cut off before its message sizes; copy it again, or leave it out.")
    rows: list[Calls] = []
    for name, whole in routines.items():
        parts = sizes.get(name, [row for row in whole if not row.bytes])
        calls, expected = (sum(row.calls for row in some) for some in (parts, whole))
        if calls != expected:
            raise CorruptDataError(
                f"{path}: the sizes of {name} are of {calls} calls, and there were {expected}; the file is cut off or "
                "damaged: copy it again, or leave it out."
            )
        rows += parts
    in_mpi = sum(row.seconds for whole in routines.values() for row in whole)
    rank = RankProfile(int(head[1]), "finalized", _seconds(path, elapsed), in_mpi, tuple(rows))
    return path, int(head[2]), rank, times


def _calls(routine: str, row: re.Match[str]) -> list[Calls]:
    count = int(row[2])
    return [Calls(routine, count, float(row[4]), bytes=count * float(row[3]))] if count else []


def _seconds(path: Path, word: str) -> float:
    if not _SECONDS.fullmatch(word):
        raise CorruptDataError(
            f"{path}: expected seconds such as 105.816, got {word[:60]!r}; the file is damaged: copy it again, or "
            "leave it out."
        )
    return float(word)
