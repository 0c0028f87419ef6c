"""Reads the text report of mpiP, one file for all ranks (``PROGRAM.RANKS.PID.1.mpiP``).

Its numbers have three or four digits. Bytes are those that a rank sent; calls that only receive have none. A rank whose
share of a call site is below mpiP's threshold (-t) has no line.

Source: mpiP's user guide, version 3, section "mpiP Output".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from hvdkit.errors import CorruptDataError
from hvdkit.read.mpi_profile.model import MPIP, Calls, Profile, RankProfile

HEAD = "@ mpiP"
_SECTION = re.compile(r"^@-+ (.*?) -*\s*$")
_END = "End of Report"
_TIMES, _TASKS, _SENT, _SITES = "Callsite Time statistics", "MPI Time", "Callsite Message Sent statistics", "Callsites"
_DIGITS = 19
"""Fewer than these have all numbers that an MPI library counts."""
_MILLISECONDS = 1e-3

Site = tuple[str, int, int]
"""Routine, number of the call site, rank."""


def read(files: Sequence[tuple[Path, str]]) -> Profile:
    """The profile of a job.

    Args:
        files: one path and its content.
    Raises:
        CorruptDataError: more than one report; it is cut off, or a concise one without the ranks.
    """
    if len(files) != 1:
        names = ", ".join(str(path) for path, _ in files[:3])
        raise CorruptDataError(f"One report of mpiP holds all ranks, got {len(files)}: {names}; give one.")
    ((path, text),) = files
    sections = _sections(text)
    if _END not in sections and _TIMES not in sections:
        raise CorruptDataError(f"{path} is cut off before its call sites; copy it again.")
    if _TIMES not in sections:
        raise CorruptDataError(
            f"{path} is a concise report of mpiP (-c or -d), without the times of each rank; record again without."
        )
    if _END not in sections:
        raise CorruptDataError(f"{path} is cut off: there is no 'End of Report'; copy it again.")
    tasks = _tasks(path, sections.get(_TASKS, []))
    rows = _calls(path, sections)

    def of_rank(number: int) -> tuple[Calls, ...]:
        return tuple(row for (_, _, rank), row in rows.items() if rank == number)

    return Profile(
        source=MPIP,
        size=len(tasks),
        ranks=tuple(
            RankProfile(number, "finalized", app, sum(row.seconds for row in of_rank(number)), of_rank(number))
            for number, (app, _) in sorted(tasks.items())
        ),
        mpi_seconds={number: mpi for number, (_, mpi) in sorted(tasks.items())},
        notes=("mpiP gives three digits, and as bytes those that a rank sent.",),
    )


def _sections(text: str) -> dict[str, list[str]]:
    """The lines of each section, by the first words of its heading."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        match = _SECTION.match(line)
        if match:
            title = re.sub(r"\s*[(:].*", "", match[1])
            lines = found.setdefault(title, [])
        elif line and not line.startswith("-"):
            lines.append(line)
    return found


def _tasks(path: Path, lines: Sequence[str]) -> dict[int, tuple[float, float]]:
    """Seconds of the program and in MPI, by rank."""
    found = {}
    for words in map(str.split, lines):
        if len(words) >= 3 and _is_whole(words[0]):
            found[int(words[0])] = _number(path, words[1]), _number(path, words[2])
    if not found or sorted(found) != list(range(len(found))):
        raise CorruptDataError(
            f"{path}: the section 'MPI Time' does not list all tasks from 0 on; the file is damaged."
        )
    return found


def _calls(path: Path, sections: dict[str, list[str]]) -> dict[Site, Calls]:
    functions = _functions(sections.get(_SITES, []))
    found: dict[Site, Calls] = {}
    for site, count, words in _statistics(path, sections[_TIMES], numbers=3):
        longest, mean, shortest = words
        found[site] = Calls(
            routine=f"MPI_{site[0]}",
            calls=count,
            seconds=count * mean * _MILLISECONDS,
            fastest_s=shortest * _MILLISECONDS,
            slowest_s=longest * _MILLISECONDS,
            function=functions.get(site[1], ""),
        )
    for site, _, words in _statistics(path, sections.get(_SENT, []), numbers=4):
        most, _, least, total = words
        if site in found:
            found[site] = replace(found[site], bytes=total, least_bytes=least, most_bytes=most)
    return found


def _statistics(path: Path, lines: Sequence[str], *, numbers: int) -> Iterator[tuple[Site, int, list[float]]]:
    """The lines of single ranks: name, site, rank, count and so many numbers."""
    for line in lines:
        words = line.split()
        if len(words) < 4 + numbers or words[0] == "Name" or words[2] == "*":
            continue
        if not (all(map(_is_whole, words[1:4])) and words[0].isidentifier()):
            raise CorruptDataError(f"{path}: expected a call site with its rank and count, got {line[:60]!r}.")
        if int(words[3]):
            values = [_number(path, word) for word in words[4 : 4 + numbers]]
            yield (words[0], int(words[1]), int(words[2])), int(words[3]), values


def _functions(lines: Sequence[str]) -> dict[int, str]:
    """The function of each call site; its lines are: ID, level, file or address, line number, function, MPI call."""
    found: dict[int, str] = {}
    for words in map(str.split, lines):
        if len(words) >= 5 and _is_whole(words[0]) and words[1] == "0":
            # Without debug information there is an address, and no line number; a C++ name can hold blanks.
            first = 4 if words[3].isdigit() else 3
            name = " ".join(words[first:-1])
            found[int(words[0])] = "" if name == "[unknown]" else name
    return found


def _is_whole(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < _DIGITS


def _number(path: Path, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise CorruptDataError(f"{path}: expected a number from 0 on, got {word[:40]!r}; the file is damaged.")
    return value
