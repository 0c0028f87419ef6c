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
_HALF_MILLISECOND, _HALF_TENTH = 0.0005, 0.05


def read(files: Sequence[tuple[Path, str]]) -> Profile:
    """The profile of a job.

    Args:
        files: paths and contents, of one job.
    Raises:
        CorruptDataError: a file is cut off, its parts disagree, or the files are of different jobs.
    """
    ranks: dict[int, tuple[Path, RankProfile]] = {}
    sums: dict[int, dict[str, Calls]] = {}
    sizes: dict[int, Path] = {}
    times: dict[int, float] = {}
    for path, text in files:
        size, rank, routines = _read_one(path, text)
        if rank.rank in ranks:
            raise CorruptDataError(
                f"Rank {rank.rank} is in two files, {ranks[rank.rank][0]} and {path}; give the files of one job."
            )
        ranks[rank.rank] = path, rank
        sums[rank.rank] = routines
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
        sums=sums,
    )


def _read_one(path: Path, text: str) -> tuple[int, RankProfile, dict[str, Calls]]:
    """One rank's file: number of ranks, the rank with its calls, their sums; an error where these do not fit."""
    lines = text.splitlines()
    head = HEAD.match(lines[0]) if lines else None
    if head is None:
        raise CorruptDataError(f"{path}, line 1: expected 'Data for MPI rank N of M:', as mpitrace writes it.")
    number, size = int(head[1]), int(head[2])
    if number >= size:
        raise CorruptDataError(f"{path}, line 1: there is no rank {number} of {size}.")
    total, elapsed = _first(path, _TOTAL, lines), _first(path, _ELAPSED, lines)
    if total is None or elapsed is None or not any(line.startswith(_SIZES_BEGIN) for line in lines):
        missing = "times" if total is None or elapsed is None else "message sizes"
        raise CorruptDataError(f"{path} is cut off before its {missing}; copy it again, or leave it out.")
    routines = _routines(path, lines)
    slack = _HALF_MILLISECOND * (len(routines) + 1) + 1e-9
    summed = sum(row.seconds for row in routines.values())
    if abs(summed - total) > slack:
        raise CorruptDataError(
            f"{path}: its routines take {summed:.3f} s together and its total says {total:.3f} s; the file is damaged: "
            "copy it again, or leave it out."
        )
    rows: list[Calls] = []
    by_size = _sizes(lines)
    for name in by_size:
        if name not in routines:
            raise CorruptDataError(f"{path}: there are sizes of {name}, and no line for it; the file is damaged.")
    for name, whole in routines.items():
        if name not in by_size and whole.bytes:
            raise CorruptDataError(f"{path} is cut off before the message sizes of {name}; copy it again.")
        parts = by_size.get(name, [whole])
        _check_sum(path, whole, parts)
        rows += parts
    return size, RankProfile(number, "finalized", elapsed, summed, tuple(rows)), routines


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


def _check_sum(path: Path, whole: Calls, parts: Sequence[Calls]) -> None:
    """The sizes of a routine are all of its calls, bytes and seconds, within what rounding leaves."""
    calls = sum(part.calls for part in parts)
    if calls != whole.calls:
        raise CorruptDataError(
            f"{path}: the sizes of {whole.routine} are of {calls} calls, and there were {whole.calls}; the file is cut "
            "off or damaged: copy it again, or leave it out."
        )
    data, seconds = sum(part.bytes or 0 for part in parts), sum(part.seconds for part in parts)
    off_bytes, off_seconds = abs(data - (whole.bytes or 0)), abs(seconds - whole.seconds)
    if off_bytes > 2 * _HALF_TENTH * calls + 1e-6 or off_seconds > _HALF_MILLISECOND * (len(parts) + 1) + 1e-9:
        raise CorruptDataError(
            f"{path}: the sizes of {whole.routine} sum up to {data:.0f} bytes in {seconds:.3f} s, and its line says "
            f"{whole.bytes or 0:.0f} bytes in {whole.seconds:.3f} s; the file is damaged: copy it again."
        )


def _times_of_all(path: Path, text: str) -> dict[int, float]:
    """Seconds in MPI of every rank, from the table in the file of rank 0; the names of hosts stay there."""
    found: dict[int, float] = {}
    column: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if "taskid" in words and "comm(s)" in words:
            column = words.index("comm(s)")
        elif column is not None and words and _RANK.fullmatch(words[0]) and len(words) > column:
            found[int(words[0])] = _seconds(path, number, words[column])
        elif column is not None:
            break
    return found


def _first(path: Path, pattern: re.Pattern[str], lines: Sequence[str]) -> float | None:
    matches = ((number, pattern.match(line)) for number, line in enumerate(lines, start=1))
    return next((_seconds(path, number, match[1]) for number, match in matches if match), None)


def _seconds(path: Path, line: int, word: str) -> float:
    if not _SECONDS.fullmatch(word):
        raise CorruptDataError(
            f"{path}, line {line}: expected seconds such as 105.816, got {word[:60]!r}; the file is damaged: copy it "
            "again, or leave it out."
        )
    return float(word)
