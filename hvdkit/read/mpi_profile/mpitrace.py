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
from hvdkit.read.mpi_profile.model import MPITRACE, Calls, Profile, RankProfile

HEAD = re.compile(r"^Data for MPI rank (\d{1,7}) of (\d{1,7}):")
_ROUTINE = re.compile(r"^(MPI_\w+)\s+(\d{1,18})\s+(\d{1,18}(?:\.\d+)?)\s+(\d{1,18}(?:\.\d+)?)\s*$")
_SIZES_OF = re.compile(r"^\s*(MPI_\w+)\s+#calls\s+avg\. bytes\s+time\(sec\)\s*$")
_SIZE = re.compile(r"^\s+(\d{1,18})\s+(\d{1,18}(?:\.\d+)?)\s+(\d{1,18}(?:\.\d+)?)\s*$")
_TOTAL = re.compile(r"^total communication time\s*=\s*(\S+) seconds")
_ELAPSED = re.compile(r"^total elapsed time\s*=\s*(\S+) seconds")
_SECONDS = re.compile(r"\d{1,18}(?:\.\d+)?")
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
    ranks: dict[int, tuple[Path, RankProfile]] = {}
    sizes: dict[int, Path] = {}
    times: dict[int, float] = {}
    for path, text in files:
        size, rank = _read_one(path, text)
        if rank.rank in ranks:
            raise CorruptDataError(
                f"Rank {rank.rank} is in two files, {ranks[rank.rank][0]} and {path}; give the files of one job."
            )
        ranks[rank.rank] = path, rank
        sizes.setdefault(size, path)
        times.update(_times_of_all(path, text))
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise CorruptDataError(f"{first} is of {one} ranks and {second} of {other}; give the files of one job.")
    times.update({number: rank.mpi_seconds for number, (_, rank) in ranks.items() if number not in times})
    return Profile(
        source=MPITRACE,
        size=next(iter(sizes)),
        ranks=tuple(ranks[number][1] for number in sorted(ranks)),
        mpi_seconds=dict(sorted(times.items())),
        notes=("mpitrace rounds bytes to a tenth per call and seconds to a millisecond.",),
    )


def _read_one(path: Path, text: str) -> tuple[int, RankProfile]:
    """One rank's file: number of ranks, the rank with its calls; an error where their numbers do not agree."""
    lines = text.splitlines()
    head = HEAD.match(lines[0]) if lines else None
    if head is None or int(head[1]) >= int(head[2]):
        raise CorruptDataError(f"{path}, line 1: expected 'Data for MPI rank N of M:', as mpitrace writes it.")
    elapsed = next((match for match in map(_ELAPSED.match, lines) if match), None)
    if elapsed is None or not any(line.startswith(_SIZES_BEGIN) for line in lines):
        raise CorruptDataError(f"{path} is cut off before its message sizes; copy it again, or leave it out.")
    routines, by_size = _routines(path, lines), _sizes(lines)
    rows: list[Calls] = []
    for name, whole in routines.items():
        parts = by_size.get(name, [] if whole.bytes else [whole])
        calls = sum(part.calls for part in parts)
        if calls != whole.calls:
            raise CorruptDataError(
                f"{path}: the sizes of {name} are of {calls} calls, and there were {whole.calls}; the file is cut off "
                "or damaged: copy it again, or leave it out."
            )
        rows += parts
    summed = sum(row.seconds for row in routines.values())
    return int(head[2]), RankProfile(int(head[1]), "finalized", _seconds(path, elapsed[1]), summed, tuple(rows))


def _routines(path: Path, lines: Sequence[str]) -> dict[str, Calls]:
    """The table of routines, which comes before the times."""
    found: dict[str, Calls] = {}
    for number, line in enumerate(lines, start=1):
        if _TOTAL.match(line):
            break
        if match := _ROUTINE.match(line):
            row = _calls(match[1], match[2], match[3], match[4])
            if row is not None:
                found[match[1]] = row
        elif line.startswith("MPI_") and not line.startswith("MPI_Routine"):
            raise CorruptDataError(
                f"{path}, line {number}: expected a routine with calls, bytes and seconds, got {line[:60]!r}."
            )
    return found


def _sizes(lines: Sequence[str]) -> dict[str, list[Calls]]:
    found: dict[str, list[Calls]] = {}
    inside, routine = False, ""
    for line in lines:
        if line.startswith(_SIZES_BEGIN):
            inside = True
        elif line.startswith(_SIZES_END):
            break
        elif inside and (match := _SIZES_OF.match(line)):
            routine = match[1]
            found[routine] = []
        elif inside and routine and (match := _SIZE.match(line)):
            row = _calls(routine, match[1], match[2], match[3])
            if row is not None:
                found[routine].append(row)
    return found


def _calls(routine: str, calls: str, average: str, seconds: str) -> Calls | None:
    count, size = int(calls), float(average)
    return Calls(routine, count, float(seconds), bytes=count * size) if count else None


def _times_of_all(path: Path, text: str) -> dict[int, float]:
    """Seconds in MPI of every rank, from the table in the file of rank 0; the names of hosts stay there."""
    found: dict[int, float] = {}
    column: int | None = None
    for line in text.splitlines():
        words = line.split()
        if "taskid" in words and "comm(s)" in words:
            column = words.index("comm(s)")
        elif column is not None and words and _RANK.fullmatch(words[0]) and len(words) > column:
            found[int(words[0])] = _seconds(path, words[column])
        elif column is not None:
            break
    return found


def _seconds(path: Path, word: str) -> float:
    if not _SECONDS.fullmatch(word):
        raise CorruptDataError(
            f"{path}: expected seconds such as 105.816, got {word[:60]!r}; the file is damaged: copy it again, or "
            "leave it out."
        )
    return float(word)
