"""What is said of a profile: routines, sizes with bus bandwidth, spread over the ranks, and what costs the job time.

Horovod negotiates in a thread of its own beside the training, in every cycle, whatever the training does: the time of
its negotiation is no step's time, and which rank's training is late cannot be seen in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import asdict

from hvdkit.common.allreduce import NUMBER_BYTES, SMALL_BYTES, bus_factor
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.errors import name_ranks
from hvdkit.observe import lateness
from hvdkit.read.causes import HOW_MUCH_IS_HIDDEN, SENTENCES, WHY_LATE, WORTH_SAYING, Cause, by_cost
from hvdkit.read.mpi_profile.model import HVDKIT, PAYLOAD, PURPOSES, Calls, Profile, RankProfile

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
_UNEVEN = 0.05
"""Imbalance from which on the ranks are not alike."""
UNSEEN = (
    "Which rank's input or computation is late an MPI profile of Horovod does not show: record hvdkit launch "
    "--explain-job."
)


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


class ShownProfile(Document, frozen=True):
    """What MPI did in a job, whatever recorded it; None is what the files do not say.

    Attributes:
        source: what recorded it: "hvdkit" or "mpitrace".
        library: the MPI; "" where it is not known.
        size: ranks of the job.
        missing: ranks without a record.
        mpi_seconds: in MPI, over every rank that a file tells it of.
        shown_rank: routines, sizes and traffic are of this rank.
        routines, sizes: in the order of time.
        certain: control is known, not told from payload by size and number.
        traffic: sums by purpose: "payload", "control", "synchronisation" and "management".
        ranks: all that there is a record of.
        causes: what costs the job time, the one that costs the largest share first.
        notes: what a reader should know, full sentences.
    """

    kind = "mpi-profile"
    schema = 4
    written_by = "hvdkit mpi-profile show --json"

    source: str
    library: str
    size: int
    missing: tuple[int, ...]
    mpi_seconds: Spread | None
    shown_rank: int
    routines: tuple[Routine, ...]
    sizes: tuple[Size, ...]
    certain: bool
    traffic: dict[str, Sums]
    ranks: tuple[RankProfile, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]


def shown_as(profile: Profile, shown: RankProfile) -> ShownProfile:
    """The profile with all that is said of it; ``shown``: the rank that routines and sizes are about."""
    certain = profile.source == HVDKIT
    notes = [profile.missing_text] if profile.missing else []
    if shown.horovod:
        notes.append(
            "Control is Horovod's negotiation, in a thread of its own, also while the training computes: it costs a "
            "core, and the step only what the step waits for."
        )
    if shown.horovod and not certain:
        notes.append(
            "These files have sizes alone, by which Horovod's negotiation is told from data; its responses, one more "
            "broadcast for each gather, are counted as data."
        )
    notes += [
        *profile.notes,
        "Only MPI is seen: what NCCL, Gloo or torch.distributed moved is not in here, nor what Horovod did between the "
        "calls ('hvdkit timeline' shows that).",
    ]
    return ShownProfile(
        source=profile.source,
        library=profile.library,
        size=profile.size,
        missing=profile.missing,
        mpi_seconds=spread(dict(profile.mpi_seconds)) if profile.mpi_seconds else None,
        shown_rank=shown.rank,
        routines=tuple(routines(profile, shown)),
        sizes=tuple(sizes(profile, shown)),
        certain=certain,
        traffic={name: total(shown.of(name)) for name in PURPOSES},
        ranks=profile.ranks,
        causes=tuple(by_cost(causes(profile, shown))),
        notes=tuple(notes),
    )


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


def causes(profile: Profile, shown: RankProfile) -> list[Cause]:
    """What costs time, on the rank that is shown, in no order; nothing where it is not known how long it ran."""
    if not shown.seconds:
        return []
    late = _late(profile, shown) or _waiting(shown)
    found = [_large(profile, shown), _small(profile, shown), late]
    return [cause for cause in found if cause is not None]


def otherwise(shown: RankProfile) -> str:
    """The verdict where no cause is worth a sentence."""
    sizes = [row.most_bytes or row.average_bytes or 0 for row in shown.of(PAYLOAD, "MPI_Allreduce")]
    if shown.horovod and max(sizes, default=0) <= NUMBER_BYTES:
        return (
            "The gradients are not in this profile: Horovod negotiated over MPI and reduced over NCCL or Gloo. What "
            "that costs hvdkit launch --timeline FILE records."
        )
    if not shown.seconds:
        return "It cannot tell: the profile does not say how long the job ran."
    return f"No data that MPI moved costs the job {share_text(WORTH_SAYING)} or more of its time. {UNSEEN}"


def _of_job(
    kind: str, lost: float, shown: RankProfile, evidence: str, what: str, advice: str, ranks: tuple[int, ...] = ()
) -> Cause:
    hidden = shown.horovod and kind != "late"
    share = lost / (shown.seconds or 1.0)
    return Cause(kind, lost, share, what, evidence, advice, per_step=False, ranks=ranks, at_most=hidden)


def _large(profile: Profile, shown: RankProfile) -> Cause | None:
    """The time of payload calls of at least 64 KiB on the shown rank."""
    rows = [row for row in shown.of(PAYLOAD) if (row.average_bytes or 0) >= SMALL_BYTES]
    whole = total(rows)
    lost = _moving(profile, shown, whole)
    if not rows:
        return None
    lines = [
        line
        for line in sizes(profile, shown)
        if line.purpose == PAYLOAD and (line.average_bytes or 0) >= SMALL_BYTES and line.bus_bytes_per_s is not None
    ]
    most = max(lines, key=lambda line: line.seconds, default=None)
    evidence = f"rank {shown.rank}: {whole.calls:,} calls of at least 64 KiB"
    if most is not None:
        evidence += (
            f"; {most.calls:,} {most.routine} of {bytes_text(most.average_bytes or 0)} took "
            f"{duration_text(1e6 * most.seconds / most.calls)} each, {bytes_text(most.bus_bytes_per_s or 0)}/s of bus "
            "bandwidth"
        )
    what = "MPI moves data in calls of at least 64 KiB."
    advice = f"{SENTENCES['large-tensors'][1]} {HOW_MUCH_IS_HIDDEN}"
    return _of_job("large-tensors", lost, shown, evidence, what, advice)


def _small(profile: Profile, shown: RankProfile) -> Cause | None:
    rows = [row for row in shown.of(PAYLOAD, "MPI_Allreduce") if (row.average_bytes or 0) < SMALL_BYTES]
    small = total(rows)
    if not rows:
        return None
    evidence = f"rank {shown.rank}: {small.calls:,} allreduces below 64 KiB"
    return _of_job("small-tensors", _moving(profile, shown, small), shown, evidence, *SENTENCES["small-tensors"])


def _moving(profile: Profile, shown: RankProfile, calls: Sums) -> float:
    """Seconds without the wait for later ranks: the rank that spends the least time in MPI has none."""
    if calls.wait_s or shown.horovod or not shown.mpi_seconds:
        return calls.seconds - (calls.wait_s or 0.0)
    least = min(dict(profile.mpi_seconds).values(), default=shown.mpi_seconds)
    return calls.seconds * min(1.0, least / shown.mpi_seconds)


def _waiting(shown: RankProfile) -> Cause | None:
    """Where --mpi-profile-wait measured it."""
    whole = total(shown.of(PAYLOAD))
    if not whole.wait_s:
        return None
    evidence = f"barriers of --mpi-profile-wait, {share_text(whole.wait_s / whole.seconds)} of the time of data"
    what = f"Rank {shown.rank} waits in collectives until all ranks are there."
    return _of_job("late", whole.wait_s, shown, evidence, what, SENTENCES["late"][1])


def _late(profile: Profile, shown: RankProfile) -> Cause | None:
    """Collectives end together: who spends the least time in them mostly comes last; not under Horovod's thread."""
    times = dict(profile.mpi_seconds)
    if shown.horovod or len(times) < 2:
        return None
    over = spread(times)
    if over.imbalance < _UNEVEN:
        return None
    behind = lateness.costs(-np.array([times[rank] for rank in sorted(times)])[:, None])
    costs = dict(zip(sorted(times), behind.tolist(), strict=True))
    ranks = lateness.to_blame(costs) or (over.least_rank,)
    evidence = (
        f"time in MPI: rank {over.least_rank} {duration_text(1e6 * over.least)}, median "
        f"{duration_text(1e6 * over.median)}, rank {over.most_rank} {duration_text(1e6 * over.most)}"
    )
    come, them = ("comes", "it") if len(ranks) == 1 else ("come", "them")
    what = f"{name_ranks(ranks).capitalize()} mostly {come} last to the collectives, and the others wait for {them}."
    return _of_job("late", sum(costs[rank] for rank in ranks), shown, evidence, what, WHY_LATE, ranks)
