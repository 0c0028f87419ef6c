"""A profile of a job: what each of its ranks called, how often, with how many bytes and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdkit.common.json_files import Part

HVDKIT, MPITRACE, MPIP = "hvdkit", "mpitrace", "mpiP"
"""What a profile was recorded with."""


def _named(words: str) -> frozenset[str]:
    return frozenset(f"MPI_{word}" for word in words.split())


NON_BLOCKING = _named("Isend Ibsend Issend Irsend Irecv Imrecv Start Startall Put Get Accumulate")
"""Of those that are no collectives; such a call begins a transfer and does not wait for its end."""
COMPLETIONS = _named(
    "Wait Waitall Waitany Waitsome Test Testall Testany Testsome Probe Iprobe Mprobe Improbe Win_fence"
)
"""What waits for a transfer that was begun before, or for a message."""
BARRIERS = _named("Barrier Ibarrier")
COLLECTIVES = _named(
    "Bcast Gather Gatherv Scatter Scatterv Allgather Allgatherv Alltoall Alltoallv Alltoallw Reduce Allreduce "
    "Reduce_scatter Reduce_scatter_block Scan Exscan"
)
"""The blocking ones that move data."""
POINT_TO_POINT = _named("Send Bsend Ssend Rsend Recv Mrecv Sendrecv Sendrecv_replace")


def non_blocking_collective(routine: str) -> bool:
    """Whether it begins a collective that moves data."""
    return routine.startswith("MPI_I") and f"MPI_{routine[5:].capitalize()}" in COLLECTIVES


def moves_data(routine: str) -> bool:
    """Whether it is there to move data, now or later."""
    return (
        routine in COLLECTIVES
        or routine in POINT_TO_POINT
        or (routine in NON_BLOCKING and not routine.startswith("MPI_Start"))
        or non_blocking_collective(routine)
    )


class Calls(Part, frozen=True):
    """Calls of one routine that are alike, of one rank.

    Attributes:
        routine: such as "MPI_Allreduce".
        calls: how many, > 0.
        seconds: in all of them together.
        bytes: in all of them together, as this rank hands them in; None where the file does not say.
        least_bytes, most_bytes: of one call; None where it is not known.
        fastest_s, slowest_s: seconds of one call; None where it is not known.
        wait_s: of ``seconds``, until all ranks were there; None where that was not measured.
        processes: of the communicator; None where it is not known.
        caller: library or program that called, such as "horovod"; "" where it is not known.
        op, datatype: such as "MPI_SUM" and "MPI_FLOAT"; "" for none, for one that is not predefined, and not known.
        function: the function that called, as mpiP names it; "" where it is not known.
    """

    routine: str
    calls: int
    seconds: float
    bytes: float | None = None
    least_bytes: float | None = None
    most_bytes: float | None = None
    fastest_s: float | None = None
    slowest_s: float | None = None
    wait_s: float | None = None
    processes: int | None = None
    caller: str = ""
    op: str = ""
    datatype: str = ""
    function: str = ""

    @property
    def average_bytes(self) -> float | None:
        """Of one call."""
        return None if self.bytes is None else self.bytes / self.calls


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What one rank recorded.

    Attributes:
        rank: its number.
        seconds: from MPI_Init to the end of the record; None where the file does not say.
        calls: what it called.
        state: how the record ends: "finalized", "exited" (without MPI_Finalize), "aborted", "running" (killed, or still
            running).
        sums: by routine, where the file states them beside the parts, whose rounded numbers sum up to a little else.
    """

    rank: int
    seconds: float | None
    calls: tuple[Calls, ...]
    state: str = "finalized"
    sums: Mapping[str, Calls] = field(default_factory=dict)

    def of(self, routine: str) -> tuple[Calls, ...]:
        """The calls of a routine: the sum that the file states, else all parts."""
        stated = self.sums.get(routine)
        return (stated,) if stated is not None else tuple(row for row in self.calls if row.routine == routine)

    @property
    def mpi_seconds(self) -> float:
        """In MPI, all threads together."""
        return sum(row.seconds for row in self.sums.values() or self.calls)


@dataclass(frozen=True, slots=True)
class Profile:
    """A job.

    Attributes:
        source: "hvdkit", "mpitrace" or "mpiP".
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
