"""Reads mpi_profile.RANK.json, the files of ``hvdkit launch --mpi-profile``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from hvdkit.common import json_files
from hvdkit.common.json_files import Document, Part
from hvdkit.errors import CorruptDataError
from hvdkit.read.mpi_profile.model import HVDKIT, Calls, Profile, Rank

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

    def __post_init__(self) -> None:
        if not self.least_bytes <= self.bytes / self.calls <= self.most_bytes:
            raise ValueError(
                f"bytes is {self.bytes}, expected those of {self.calls} calls of {self.least_bytes} to "
                f"{self.most_bytes}"
            )


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
    found = json_files.decode(text, RankFile, str(path), CorruptDataError)
    calls = tuple(row for group in found.calls for row in _rows(group, measured=found.wait_measured))
    rank = Rank(found.rank, found.seconds, calls, found.state)
    return _File(path, found.job, found.size, rank, found.library, found.lost)


def _rows(group: Group, *, measured: bool) -> Iterator[Calls]:
    for one in group.bins:
        yield Calls(
            routine=group.routine,
            calls=one.calls,
            seconds=one.seconds,
            bytes=one.bytes,
            least_bytes=one.least_bytes,
            most_bytes=one.most_bytes,
            fastest_s=one.least_seconds,
            slowest_s=one.most_seconds,
            wait_s=one.wait_seconds if measured else None,
            processes=group.processes or None,
            caller=group.caller,
            op=group.op,
            datatype=group.type,
        )
