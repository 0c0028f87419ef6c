"""Finds the files of a profile, tells what wrote them, and reads them.

IBM's mpitrace writes text, ``mpi_profile.N``. It keeps the files of rank 0 and of the ranks with the least, the median
and the most time in MPI, unless SAVE_ALL_TASKS=yes is set; that of rank 0 tells the times of all. Its numbers are
rounded: bytes to a tenth per call, seconds to a millisecond.

Source: its output, and ``summary.c`` of its published source (mpitrace, IBM).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from hvdkit.common import files, json_files
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import count_text
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError
from hvdkit.read.mpi_profile.model import HVDKIT, MPITRACE, Calls, Profile, RankProfile, of_ranks

_PATTERN = "mpi_profile.*"
_HEAD = re.compile(r"^Data for MPI rank (\d{1,7}) of (\d{1,7}):")
_NUMBER = r"(\d{1,18}(?:\.\d+)?)"
_ROW = re.compile(rf"(MPI_\w+)?\s+(\d{{1,18}})\s+{_NUMBER}\s+{_NUMBER}\s*")
"""Calls, average bytes and seconds: of a routine, or below its heading of a size."""
_SIZES_OF = re.compile(r"\s*(MPI_\w+)\s+#calls\s+avg\. bytes\s+time\(sec\)\s*")
_ELAPSED = re.compile(r"total elapsed time\s*=\s*(\S+) seconds")
_SECONDS = re.compile(_NUMBER)
_RANK = re.compile(r"\d{1,7}")
_SIZES_BEGIN = "Message size distributions:"
_SIZES_END = ("Summary for on-node", "Call Graph Section", "Communication summary", "MPI timing summary")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]


class Bin(Part, frozen=True, forbid_unknown_fields=False):
    """Calls whose size is in one power-of-two range.

    Attributes:
        calls: how many, > 0.
        bytes: in all of them together.
        least_bytes, most_bytes: of one call.
        seconds: in all of them together.
        least_seconds, most_seconds: of one call.
        wait_seconds: of ``seconds``, until all ranks were there; 0 where that was not measured.
    """

    calls: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    bytes: _Count
    least_bytes: _Count
    most_bytes: _Count
    seconds: _Seconds
    least_seconds: _Seconds
    most_seconds: _Seconds
    wait_seconds: _Seconds = 0.0


class Group(Part, frozen=True):
    """Calls of one routine, caller, operation and type.

    Attributes:
        routine: such as "MPI_Allreduce".
        caller: library or program that called; "" where it is not known.
        op, type: such as "MPI_SUM" and "MPI_FLOAT"; "" for none, and for one that is not predefined.
        processes: of the communicator; 0 where it is not known.
        bins: by size.
    """

    routine: Annotated[str, msgspec.Meta(pattern="^MPI_[A-Za-z0-9_]+$")]
    caller: str
    op: str
    type: str
    processes: _Count
    bins: tuple[Bin, ...]


class RankFile(Document, frozen=True, forbid_unknown_fields=False):
    """What MPI did on one rank.

    Attributes:
        job: the same in the files of one job.
        rank: its number.
        size: ranks of the job.
        state: how the record ends: "finalized", "exited" (without MPI_Finalize), "aborted", "running" (killed, or still
            running).
        seconds: from MPI_Init to the end of the record.
        library: the MPI.
        lost: calls that were not recorded.
        calls: what it called.
        wait_measured: whether the wait for other ranks was measured.
        threads: MPI's level of support for them.
    """

    kind = "mpi-profile-rank"
    written_by = "hvdkit launch --mpi-profile"
    fix = "the file is damaged or cut off: copy it again, or leave it out"

    job: str
    rank: _Count
    size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    state: Annotated[str, msgspec.Meta(pattern="^(finalized|exited|aborted|running)$")]
    seconds: _Seconds
    library: str
    lost: _Count
    calls: tuple[Group, ...]
    wait_measured: bool = False
    threads: str = ""


def _read_ours(files: Sequence[tuple[Path, str]]) -> Profile:
    """The profile of a job that hvdkit recorded; of several jobs in one directory the newest."""
    found = [(path, json_files.decode(text, RankFile, str(path), CorruptDataError)) for path, text in files]
    _, newest = max(found, key=lambda one: one[0].stat().st_mtime_ns if one[0].exists() else 0)
    of_job = sorted((one for one in found if one[1].job == newest.job), key=lambda one: one[1].rank)
    parts = []
    for path, file in of_job:
        calls = tuple(
            Calls(
                routine=group.routine,
                calls=of_size.calls,
                seconds=of_size.seconds,
                bytes=of_size.bytes,
                least_bytes=of_size.least_bytes,
                most_bytes=of_size.most_bytes,
                fastest_s=of_size.least_seconds,
                wait_s=of_size.wait_seconds if file.wait_measured else None,
                processes=group.processes or None,
                caller=group.caller,
                op=group.op,
                datatype=group.type,
            )
            for group in file.calls
            for of_size in group.bins
        )
        rank = RankProfile(file.rank, file.state, file.seconds, sum(row.seconds for row in calls), calls)
        parts.append((path, file.size, rank))
    notes = []
    if older := len(found) - len(of_job):
        notes.append(f"{count_text(older, 'file')} of an earlier job in the same directory left out.")
    for state, what in (
        ("running", "was killed, or still ran: its record ends up to a minute before its end"),
        ("exited", "ended without MPI_Finalize"),
        ("aborted", "called MPI_Abort"),
    ):
        ranks = [str(file.rank) for _, file in of_job if file.state == state]
        if ranks:
            notes.append(f"{'Rank' if len(ranks) == 1 else 'Each of ranks'} {', '.join(ranks)} {what}.")
    if lost := sum(file.lost for _, file in of_job):
        notes.append(f"{lost} calls were not recorded: more than 512 kinds of calls on a rank.")
    return of_ranks(HVDKIT, parts, {}, notes, newest.library)


def _read_mpitrace(files: Sequence[tuple[Path, str]]) -> Profile:
    """The profile of a job.

    Args:
        files: paths and contents, of one job.
    Raises:
        CorruptDataError: a file is cut off, its parts disagree, or the files are of different jobs.
    """
    found = [_read_mpitrace_file(path, text) for path, text in files]
    times = {number: seconds for *_, of_all in found for number, seconds in of_all.items()}
    note = "mpitrace rounds bytes to a tenth per call and seconds to a millisecond."
    return of_ranks(MPITRACE, [(path, size, rank) for path, size, rank, _ in found], times, (note,))


def _read_mpitrace_file(path: Path, text: str) -> tuple[Path, int, RankProfile, dict[int, float]]:
    """One rank's file: number of ranks, the rank with its calls, and in that of rank 0 the seconds of all in MPI."""
    lines = text.splitlines()
    head = _HEAD.match(lines[0]) if lines else None
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


READERS = {HVDKIT: _read_ours, MPITRACE: _read_mpitrace}


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
        try:
            text = files.text(path, errors="replace")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        found.setdefault(_format(path, text), []).append((path, text))
    if len(found) > 1:
        names = " and ".join(f"{of_source[0][0]} is of {source}" for source, of_source in found.items())
        raise DataError(f"These files are of different formats: {names}; give those of one.")
    ((source, contents),) = found.items()
    return READERS[source](contents)


def _files(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise DataNotFoundError(f"{path} does not exist; give the directory of --mpi-profile, or files.")
            found.append(path)
            continue
        inside = sorted(file for file in path.glob(_PATTERN) if file.is_file())
        if not inside:
            raise DataNotFoundError(
                f"{path} holds no MPI profile (mpi_profile.*): no rank that MPI was started in has written "
                "one; record one with 'hvdkit launch --mpi-profile DIR'."
            )
        found += inside
    return list(dict.fromkeys(found))


def _format(path: Path, text: str) -> str:
    start = text.lstrip()
    if not start:
        raise CorruptDataError(f"{path} is empty: it was cut off; copy it again, or leave it out.")
    if start.startswith("{"):
        return HVDKIT
    if _HEAD.match(text):
        return MPITRACE
    raise CorruptDataError(
        f"{path} begins with {start[:40].splitlines()[0]!r}: neither a profile of hvdkit, nor of mpitrace ('Data for "
        "MPI rank ...')."
    )
