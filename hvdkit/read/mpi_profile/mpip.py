"""Reads the text report of mpiP, one file for all ranks (``PROGRAM.RANKS.PID.1.mpiP``).

Its numbers have three or four digits. Bytes are those that a rank sent; calls that only receive have none. A rank whose
share of a call site is below mpiP's threshold (-t) has no line.

Source: mpiP's user guide, version 3, section "mpiP Output".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from hvdkit.errors import CorruptDataError
from hvdkit.read.mpi_profile.model import MPIP, Calls, Profile, RankProfile, of_ranks

HEAD = "@ mpiP"
_SECTION = re.compile(r"^@-+ (.*?) -*\s*$")
_END = "End of Report"
_TIMES, _TASKS, _SENT, _SITES = "Callsite Time statistics", "MPI Time", "Callsite Message Sent statistics", "Callsites"
_WHOLE = re.compile(r"[0-9]{1,18}")
_MILLISECONDS = 1e-3

Site = tuple[str, int, int]
"""Routine, number of the call site, rank."""


def read(files: Sequence[tuple[Path, str]]) -> Profile:
    """The profile of a job.

    Args:
        files: one path and its content.
    Raises:
        CorruptDataError: more than one report; it is cut off or damaged, or a concise one without the ranks.
    """
    if len(files) != 1:
        names = ", ".join(str(path) for path, _ in files[:3])
        raise CorruptDataError(f"One report of mpiP holds all ranks, got {len(files)}: {names}; give one.")
    ((path, text),) = files
    sections = _sections(text)
    if _END not in sections or _TIMES not in sections:
        raise CorruptDataError(
            f"{path} is cut off, or a concise report (-c or -d) without the times of each rank; copy it again, or "
            "record again without."
        )
    try:
        tasks = {int(words[0]): (_number(words[1]), _number(words[2])) for words in _rows(sections.get(_TASKS, []))}
        rows = _calls(sections)
    except (ValueError, IndexError) as error:
        raise CorruptDataError(f"{path} is damaged: {error}; copy it again.") from error
    if not tasks or sorted(tasks) != list(range(len(tasks))):
        raise CorruptDataError(f"{path} does not list all tasks from 0 on under 'MPI Time'; it is damaged.")
    parts = []
    for number, (seconds, _) in tasks.items():
        calls = tuple(row for (_, _, rank), row in rows.items() if rank == number)
        in_mpi = sum(row.seconds for row in calls)
        parts.append((path, len(tasks), RankProfile(number, "finalized", seconds, in_mpi, calls)))
    times = {number: in_mpi for number, (_, in_mpi) in tasks.items()}
    return of_ranks(MPIP, parts, times, ("mpiP gives three digits, and as bytes those that a rank sent.",))


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


def _rows(lines: Sequence[str]) -> Iterator[list[str]]:
    """The words of the lines that begin with a number: of one rank or one call site."""
    return (words for words in map(str.split, lines) if _WHOLE.fullmatch(words[0]))


def _calls(sections: Mapping[str, list[str]]) -> dict[Site, Calls]:
    """The calls of each site on each rank; ``sections``: see ``_sections``."""
    functions = {}
    for words in _rows(sections.get(_SITES, [])):  # ID, level, file or address, line number, function, MPI call
        if len(words) >= 5 and words[1] == "0":
            # Without debug information there is an address, and no line number; a C++ name can hold blanks.
            first = 4 if words[3].isdigit() else 3
            functions[int(words[0])] = " ".join(words[first:-1]).replace("[unknown]", "")
    found: dict[Site, Calls] = {}
    for site, count, (_, mean, shortest) in _statistics(sections[_TIMES], numbers=3):
        found[site] = Calls(
            routine=f"MPI_{site[0]}",
            calls=count,
            seconds=count * mean * _MILLISECONDS,
            fastest_s=shortest * _MILLISECONDS,
            function=functions.get(site[1], ""),
        )
    for site, _, (most, _, least, total) in _statistics(sections.get(_SENT, []), numbers=4):
        if site in found:
            found[site] = replace(found[site], bytes=total, least_bytes=least, most_bytes=most)
    return found


def _statistics(lines: Sequence[str], *, numbers: int) -> Iterator[tuple[Site, int, list[float]]]:
    """The lines of single ranks: name, site, rank, count and so many numbers."""
    for line in lines:
        words = line.split()
        if words[0] == "Name" or (len(words) > 2 and words[2] == "*"):  # the heading, and sums over the ranks
            continue
        if not (words[0].isidentifier() and all(map(_WHOLE.fullmatch, words[1:4]))):
            raise ValueError(f"expected a call site with its rank and count, got {line[:60]!r}")
        site, rank, count = map(int, words[1:4])
        if count:
            values = [_number(word) for word in words[4 : 4 + numbers]]
            if len(values) < numbers:
                raise ValueError(f"expected {numbers} numbers after the count, got {line[:60]!r}")
            yield (words[0], site, rank), count, values


def _number(word: str) -> float:
    if not re.fullmatch(r"[0-9.]+(?:e[+-]?[0-9]{1,3})?", word) or not float(word) < float("inf"):
        raise ValueError(f"expected a number from 0 on, got {word[:40]!r}")
    return float(word)
