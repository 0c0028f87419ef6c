"""Tells Horovod's control traffic from data: which calls negotiate what is ready, and which carry tensors.

What Horovod 0.28.1 calls (``mpi_controller.cc``, ``response_cache.cc``, ``mpi_operations.cc``):

- once a cycle an allreduce of a bit vector, 8-byte words under MPI_BAND (one bit for each cached tensor and three of
  state, twice as many under a timeline); tensors are never reduced under MPI_BAND or MPI_BOR;
- for tensors that are not cached: MPI_Gather of a length (MPI_INT) and MPI_Gatherv of the requests (MPI_BYTE), then
  MPI_Bcast of a length (MPI_INT) and of the response (MPI_BYTE); tensors have other types, MPI_UINT8_T for bytes;
- MPI_Allgather at the start, MPI_Alltoall of lengths before an alltoall, both of MPI_INT; tensors use the -v forms.

Our recorder knows caller, operation and type of each call, so that this is exact. mpiP may know the function that
called. Of mpitrace's files there are sizes alone: see ``_by_size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.read.mpi_profile.model import BARRIERS, COMPLETIONS, HVDKIT, MPIP, Calls, Profile, RankProfile, moves_data

CONTROL, PAYLOAD, SYNCHRONISATION, MANAGEMENT = "control", "payload", "synchronisation", "management"
PURPOSES = (PAYLOAD, CONTROL, SYNCHRONISATION, MANAGEMENT)
"""Data; Horovod's negotiation; barriers, and waiting for what was begun before; communicators and queries."""

_BITS = ("MPI_BAND", "MPI_BOR")
_ONLY_CONTROL = ("MPI_Gather", "MPI_Gatherv", "MPI_Allgather", "MPI_Alltoall")
"""Routines that Horovod uses for nothing else."""
_FUNCTIONS = (
    *("CrossRankBitwise", "RecvReadyTensors", "SendReadyTensors", "RecvFinalTensors", "SendFinalTensors"),
    *("AlltoallGetRecvSplits", "Allgather2Ints", "MPIController"),
)
"""Of Horovod's controller, where mpiP names the caller."""
_WORD, _LARGEST_VECTOR = 8, 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """The calls of a rank with the purpose of each.

    Attributes:
        rank: the rank.
        calls: calls and purpose, one of ``PURPOSES``.
        certain: purposes are known, not taken from sizes.
        horovod: Horovod negotiated over MPI.
    """

    rank: RankProfile
    calls: tuple[tuple[Calls, str], ...]
    certain: bool
    horovod: bool

    def of(self, purpose: str, routine: str | None = None) -> list[Calls]:
        """The calls of one purpose, and of one routine where it is given."""
        return [row for row, its in self.calls if its == purpose and routine in (None, row.routine)]


def of_profile(profile: Profile) -> tuple[Traffic, ...]:
    """The traffic of every rank."""
    return tuple(_of_rank(profile.source, rank) for rank in profile.ranks)


def _of_rank(source: str, rank: RankProfile) -> Traffic:
    if source == HVDKIT:
        control = [row.caller == "horovod" and _is_control(row) for row in rank.calls]
        certain = True
    elif source == MPIP and any(_named(row) for row in rank.calls):
        control = [_named(row) for row in rank.calls]
        certain = True
    else:
        control = _by_size(rank.calls)
        certain = False
    calls = tuple(
        (row, CONTROL if is_control else _otherwise(row)) for row, is_control in zip(rank.calls, control, strict=True)
    )
    return Traffic(rank, calls, certain, any(control))


def _is_control(row: Calls) -> bool:
    """Of a call that Horovod made."""
    if row.routine == "MPI_Allreduce":
        return row.op in _BITS
    if row.routine == "MPI_Bcast":
        return row.datatype in ("MPI_INT", "MPI_BYTE")
    return row.routine in _ONLY_CONTROL


def _named(row: Calls) -> bool:
    return any(name in row.function for name in _FUNCTIONS)


def _otherwise(row: Calls) -> str:
    if moves_data(row.routine):
        return PAYLOAD
    return SYNCHRONISATION if row.routine in COMPLETIONS or row.routine in BARRIERS else MANAGEMENT


def _by_size(rows: Sequence[Calls]) -> list[bool]:
    """Taken for control where only sizes are known.

    A job is taken for one of Horovod over MPI when it has as many gathers as gathers of unequal parts, the former of 4
    bytes: the lengths of its requests and the requests. Then those are control, and so are allgathers of 4 bytes,
    broadcasts of 4 bytes (lengths, when they are no fewer than the gathers), and the allreduces of the most frequent
    size, when that is a small number of 8-byte words. Responses, one more broadcast for each gather, look like data of
    any size and stay with the data.
    """
    gathers = _count(rows, "MPI_Gather", size=4)
    if not gathers or gathers != _count(rows, "MPI_Gatherv") or gathers != _count(rows, "MPI_Gather"):
        return [False] * len(rows)
    reductions = [row for row in rows if row.routine == "MPI_Allreduce"]
    vectors = max(reductions, key=lambda row: row.calls, default=None)
    if vectors is not None and not _is_bit_vector(vectors.average_bytes):
        vectors = None
    return [
        row is vectors
        or row.routine in ("MPI_Gather", "MPI_Gatherv")
        or (row.routine == "MPI_Allgather" and row.average_bytes == 4)
        or (row.routine == "MPI_Bcast" and row.average_bytes == 4 and row.calls >= gathers)
        for row in rows
    ]


def _count(rows: Sequence[Calls], routine: str, size: float | None = None) -> int:
    return sum(row.calls for row in rows if row.routine == routine and size in (None, row.average_bytes))


def _is_bit_vector(size: float | None) -> bool:
    return size is not None and 0 < size <= _LARGEST_VECTOR and abs(size / _WORD - round(size / _WORD)) < 1e-9
