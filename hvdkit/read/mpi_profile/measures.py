"""What a profile says in numbers: routines, sizes with bus bandwidth, spread over the ranks, control and payload."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import asdict

from hvdkit.common.allreduce import bus_factor
from hvdkit.common.json_files import Part
from hvdkit.read.mpi_profile.model import HVDKIT, PURPOSES, Calls, Profile, RankProfile

_COLLECTIVES = {
    "MPI_Allreduce": "allreduce",
    "MPI_Allgather": "allgather",
    "MPI_Allgatherv": "allgather",
    "MPI_Reduce_scatter": "reduce_scatter",
    "MPI_Reduce_scatter_block": "reduce_scatter",
    "MPI_Alltoall": "all_to_all",
    "MPI_Alltoallv": "all_to_all",
    "MPI_Alltoallw": "all_to_all",
    "MPI_Bcast": "broadcast",
    "MPI_Reduce": "reduce",
}
"""What ``allreduce.bus_factor`` calls the routines that have a bus bandwidth."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A number of each rank.

    Attributes:
        least, median, most: over the ranks.
        least_rank, most_rank: where.
        imbalance: most / mean - 1; 0 when all are equal.
    """

    least: float
    median: float
    most: float
    least_rank: int
    most_rank: int
    imbalance: float


class Sums(Part, frozen=True):
    """Calls summed up.

    Attributes:
        calls, seconds: of all.
        bytes: of those whose bytes are known; None where none are.
        average_bytes: of one call.
        wait_s: seconds until all ranks were there; None where that was not measured.
    """

    calls: int
    seconds: float
    bytes: float | None
    average_bytes: float | None
    wait_s: float | None


class Routine(Sums, frozen=True):
    """One routine on the rank that is shown.

    Attributes:
        routine: its name.
        ranks: seconds, over the ranks with a record.
    """

    routine: str
    ranks: Spread


class Size(Sums, frozen=True):
    """Calls of one routine, purpose and range of sizes.

    Attributes:
        routine: its name.
        purpose: "payload", "control", "synchronisation" or "management".
        processes: of the communicator.
        least_bytes, most_bytes: of one call.
        fastest_s: seconds of the fastest call.
        bus_bytes_per_s: bus bandwidth as nccl-tests define it; waiting left out where it was measured.
    """

    routine: str
    purpose: str
    processes: int
    least_bytes: float | None
    most_bytes: float | None
    fastest_s: float | None
    bus_bytes_per_s: float | None


def total(rows: Iterable[Calls]) -> Sums:
    """The sum of some calls."""
    rows = list(rows)
    sizes = [row.bytes for row in rows if row.bytes is not None]
    waits = [row.wait_s for row in rows if row.wait_s is not None]
    calls, size = sum(row.calls for row in rows), sum(sizes) if sizes else None
    average = None if size is None or not calls else size / calls
    return Sums(calls, sum(row.seconds for row in rows), size, average, sum(waits) if waits else None)


def spread(values: dict[int, float]) -> Spread:
    """Over the ranks.

    Args:
        values: by rank, at least one, each >= 0.
    """
    least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    mean = statistics.fmean(values.values())
    return Spread(
        least=values[least],
        median=statistics.median(values.values()),
        most=values[most],
        least_rank=least,
        most_rank=most,
        imbalance=values[most] / mean - 1 if mean > 0 else 0.0,
    )


def routines(profile: Profile, shown: RankProfile) -> list[Routine]:
    """Every routine that a rank called, in the order of time."""
    found = []
    for name in {row.routine for row in shown.calls}:
        sums = {rank.rank: total(row for row in rank.calls if row.routine == name) for rank in profile.ranks}
        seconds = {rank: of_rank.seconds for rank, of_rank in sums.items()}
        found.append(Routine(**asdict(sums[shown.rank]), routine=name, ranks=spread(seconds)))
    return sorted(found, key=lambda one: (-one.seconds, one.routine))


def sizes(profile: Profile, shown: RankProfile) -> list[Size]:
    """The calls of a rank by routine, purpose and size, in the order of time of their routine, then by size.

    Calls of a power-of-two range are one line for ours; mpitrace has ranges of its own.
    """
    ours = profile.source == HVDKIT
    groups: dict[tuple[str, str, int, int], list[Calls]] = {}
    for number, row in enumerate(shown.calls):
        which = int(row.most_bytes or 0).bit_length() if ours and row.most_bytes is not None else number
        groups.setdefault((row.routine, row.purpose, row.processes or profile.size, which), []).append(row)
    found = []
    for (routine, purpose, processes, _), rows in groups.items():
        whole = total(rows)
        moving = whole.seconds - (whole.wait_s or 0.0)
        found.append(
            Size(
                **asdict(whole),
                routine=routine,
                purpose=purpose,
                processes=processes,
                least_bytes=min((row.least_bytes for row in rows if row.least_bytes is not None), default=None),
                most_bytes=max((row.most_bytes for row in rows if row.most_bytes is not None), default=None),
                fastest_s=min((row.fastest_s for row in rows if row.fastest_s is not None), default=None),
                bus_bytes_per_s=bus_bandwidth(routine, whole.bytes, moving, processes, ours=ours),
            )
        )
    order = {one.routine: place for place, one in enumerate(routines(profile, shown))}
    return sorted(found, key=lambda one: (order[one.routine], one.average_bytes or 0, PURPOSES.index(one.purpose)))


def bus_bandwidth(routine: str, data: float | None, seconds: float, processes: int, *, ours: bool) -> float | None:
    """Bytes per second that each rank's link has to carry at least, whatever the algorithm.

    Args:
        data: bytes of all calls together, as a rank hands them in.
        seconds: of all calls together.
        processes: of the communicator, > 0.
        ours: recorded by hvdkit; what others count as the bytes of an alltoall is not known.
    Returns:
        None for routines without one, for one process, and where bytes or seconds are 0 or not known.
    Source: see ``allreduce.bus_factor``.
    """
    collective = _COLLECTIVES.get(routine)
    if collective is None or (collective == "all_to_all" and not ours) or processes < 2 or not data or seconds <= 0:
        return None
    return bus_factor(collective, processes) * data / seconds
