"""A profile of a job: what each of its ranks called, how often, with how many bytes, for how long and what for.

What Horovod 0.28.1 calls (``mpi_controller.cc``, ``response_cache.cc``, ``mpi_operations.cc``):

- once a cycle an allreduce of a bit vector, 8-byte words under MPI_BAND (one bit for each cached tensor and three of
  state, twice as many under a timeline); tensors are never reduced under MPI_BAND or MPI_BOR;
- for tensors that are not cached: MPI_Gather of a length (MPI_INT) and MPI_Gatherv of the requests (MPI_BYTE), then
  MPI_Bcast of a length (MPI_INT) and of the response (MPI_BYTE); tensors have other types, MPI_UINT8_T for bytes;
- MPI_Allgather at the start, MPI_Alltoall of lengths before an alltoall, both of MPI_INT; tensors use the -v forms.

Our recorder knows caller, operation and type of each call, so that this is exact. mpitrace knows sizes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from hvdkit.common.json_files import Part
from hvdkit.errors import CorruptDataError

HVDKIT, MPITRACE = "hvdkit", "mpitrace"
"""What a profile was recorded with."""


def _named(words: str) -> frozenset[str]:
    return frozenset(f"MPI_{word}" for word in words.split())


_SYNCHRONISES = _named(
    "Barrier Ibarrier Wait Waitall Waitany Waitsome Test Testall Testany Testsome Probe Iprobe Mprobe Improbe Win_fence"
)
"""Barriers, and what waits for a transfer that was begun before, or for a message."""
COLLECTIVES = _named(
    "Bcast Gather Gatherv Scatter Scatterv Allgather Allgatherv Alltoall Alltoallv Alltoallw Reduce Allreduce "
    "Reduce_scatter Reduce_scatter_block Scan Exscan"
)
"""The blocking ones that move data."""
_POINT_TO_POINT = _named(
    "Send Bsend Ssend Rsend Recv Mrecv Sendrecv Sendrecv_replace Isend Ibsend Issend Irsend Irecv Imrecv Put Get "
    "Accumulate"
)
CONTROL, PAYLOAD, SYNCHRONISATION, MANAGEMENT = "control", "payload", "synchronisation", "management"
PURPOSES = (PAYLOAD, CONTROL, SYNCHRONISATION, MANAGEMENT)
"""Data; Horovod's negotiation; barriers, and waiting for what was begun before; communicators and queries."""

_BITS = ("MPI_BAND", "MPI_BOR")
_ONLY_CONTROL = ("MPI_Gather", "MPI_Gatherv", "MPI_Allgather", "MPI_Alltoall")
"""Routines that Horovod uses for nothing else."""
_WORD, _LARGEST_VECTOR = 8, 1024


class Calls(Part, frozen=True):
    """Calls of a rank that are alike: of one routine, caller, operation, type and range of sizes.

    Attributes:
        routine: such as "MPI_Allreduce".
        calls: how many, > 0.
        seconds: in all of them together.
        bytes: in all of them together, as this rank hands them in; None where the file does not say.
        least_bytes, most_bytes: of one call; None where it is not known.
        fastest_s: seconds of the fastest call; None where it is not known.
        wait_s: of ``seconds``, until all ranks were there; None where that was not measured.
        processes: of the communicator; None where it is not known.
        caller: library or program that called, such as "horovod"; "" where it is not known.
        op, datatype: such as "MPI_SUM" and "MPI_FLOAT"; "" for none, for one that is not predefined, and not known.
        purpose: "payload", "control", "synchronisation" or "management".
    """

    routine: str
    calls: int
    seconds: float
    bytes: float | None = None
    least_bytes: float | None = None
    most_bytes: float | None = None
    fastest_s: float | None = None
    wait_s: float | None = None
    processes: int | None = None
    caller: str = ""
    op: str = ""
    datatype: str = ""
    purpose: str = ""

    @property
    def average_bytes(self) -> float | None:
        """Of one call."""
        return None if self.bytes is None else self.bytes / self.calls


class RankProfile(Part, frozen=True):
    """What one rank recorded.

    Attributes:
        rank: its number.
        state: how the record ends: "finalized", "exited" (without MPI_Finalize), "aborted", "running" (killed, or still
            running).
        seconds: from MPI_Init to the end of the record; None where the file does not say.
        mpi_seconds: in MPI, all threads together.
        calls: what it called.
    """

    rank: int
    state: str
    seconds: float | None
    mpi_seconds: float
    calls: tuple[Calls, ...]

    def of(self, purpose: str, routine: str | None = None) -> list[Calls]:
        """The calls of one purpose, and of one routine where it is given."""
        return [row for row in self.calls if row.purpose == purpose and routine in (None, row.routine)]

    @property
    def horovod(self) -> bool:
        """Whether Horovod negotiated over MPI."""
        return any(row.purpose == CONTROL for row in self.calls)


@dataclass(frozen=True, slots=True)
class Profile:
    """A job.

    Attributes:
        source: "hvdkit" or "mpitrace".
        size: ranks of the job, > 0.
        ranks: those that there is a record of, by number, at least one.
        mpi_seconds: seconds in MPI of every rank that some file tells them of, which can be more than ``ranks``.
        notes: what a reader should know of the files, full sentences.
        library: the MPI, "" where it is not known.
    """

    source: str
    size: int
    ranks: tuple[RankProfile, ...]
    mpi_seconds: Mapping[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    library: str = ""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a record."""
        there = {rank.rank for rank in self.ranks}
        return tuple(number for number in range(self.size) if number not in there)

    @property
    def missing_text(self) -> str:
        """Which ranks these are, a full sentence; "" when all have a record."""
        if not self.missing:
            return ""
        names = ", ".join(map(str, self.missing[:8])) + (", ..." if len(self.missing) > 8 else "")
        return f"{len(self.missing)} of {self.size} ranks left no record: {names}."


def of_ranks(
    source: str,
    parts: Sequence[tuple[Path, int, RankProfile]],
    times: Mapping[int, float],
    notes: Sequence[str],
    library: str = "",
) -> Profile:
    """The profile of a job from what was recorded of its ranks, with what each call was for.

    Args:
        parts: the file of each, the ranks that the job has by it, and the rank.
        times: seconds in MPI of ranks that a file tells otherwise than by their calls.
    Raises:
        CorruptDataError: a rank is there twice, or cannot be, or the files are of different jobs.
    """
    there: dict[int, Path] = {}
    first, size, _ = parts[0]
    for path, size_there, of_rank in parts:
        if of_rank.rank in there:
            raise CorruptDataError(
                f"Rank {of_rank.rank} is in two files, {there[of_rank.rank]} and {path}; give the files of one job."
            )
        if size_there != size:
            raise CorruptDataError(f"{first} is of {size} ranks and {path} of {size_there}; give the files of one job.")
        if of_rank.rank >= size:
            raise CorruptDataError(f"{path} is of rank {of_rank.rank} of {size}, which cannot be; record again.")
        there[of_rank.rank] = path
    ranks = sorted((of_rank for *_, of_rank in parts), key=lambda of_rank: of_rank.rank)
    seconds = {of_rank.rank: of_rank.mpi_seconds for of_rank in ranks} | dict(times)
    told = tuple(_with_purposes(rank, source) for rank in ranks)
    return Profile(source, size, told, dict(sorted(seconds.items())), tuple(notes), library)


def _with_purposes(rank: RankProfile, source: str) -> RankProfile:
    if source == HVDKIT:
        control = [row.caller == "horovod" and _is_control(row) for row in rank.calls]
    else:
        control = _by_size(rank.calls)
    pairs = zip(rank.calls, control, strict=True)
    calls = [replace(row, purpose=CONTROL if is_control else _purpose(row.routine)) for row, is_control in pairs]
    return replace(rank, calls=tuple(calls))


def _purpose(routine: str) -> str:
    """What a routine is for that is no negotiation of Horovod."""
    begins_collective = routine.startswith("MPI_I") and f"MPI_{routine[5:].capitalize()}" in COLLECTIVES
    if routine in COLLECTIVES or routine in _POINT_TO_POINT or begins_collective:
        return PAYLOAD
    return SYNCHRONISATION if routine in _SYNCHRONISES else MANAGEMENT


def _is_control(row: Calls) -> bool:
    if row.routine == "MPI_Allreduce":
        return row.op in _BITS
    if row.routine == "MPI_Bcast":
        return row.datatype in ("MPI_INT", "MPI_BYTE")
    return row.routine in _ONLY_CONTROL


def _by_size(rows: Sequence[Calls]) -> list[bool]:
    """What is taken for control where only sizes are known.

    As many gathers of 4 bytes (lengths of requests) as gathers of unequal parts (the requests) are Horovod's. Then
    those are control, and so are allgathers and broadcasts of 4 bytes, and the allreduces of the most frequent size,
    when that is a small number of 8-byte words. Responses look like data of any size and stay with the data.
    """
    lengths, requests = ([row for row in rows if row.routine == name] for name in ("MPI_Gather", "MPI_Gatherv"))
    gathers = sum(row.calls for row in lengths)
    if not gathers or gathers != sum(row.calls for row in requests) or any(row.average_bytes != 4 for row in lengths):
        return [False] * len(rows)
    reductions = [row for row in rows if row.routine == "MPI_Allreduce"]
    vectors = max(reductions, key=lambda row: row.calls, default=None)
    size = 0.0 if vectors is None else vectors.average_bytes or 0.0
    if not 0 < size <= _LARGEST_VECTOR or size % _WORD:
        vectors = None
    return [
        row is vectors
        or row.routine in ("MPI_Gather", "MPI_Gatherv")
        or (row.routine == "MPI_Allgather" and row.average_bytes == 4)
        or (row.routine == "MPI_Bcast" and row.average_bytes == 4 and row.calls >= gathers)
        for row in rows
    ]
