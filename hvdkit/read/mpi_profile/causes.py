"""What costs the job of a profile time, weighed against the time that the job took, and what else stands out in it.

Horovod negotiates in a thread of its own beside the training, in every cycle, whatever the training does: the time of
its negotiation is no step's time, and which rank's training is late cannot be seen in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdkit.common.allreduce import NUMBER_BYTES, SMALL_BYTES
from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.observe import lateness
from hvdkit.read.causes import HOW_MUCH_IS_HIDDEN, SENTENCES, WHY_LATE, WORTH_SAYING, Cause
from hvdkit.read.mpi_profile import measures
from hvdkit.read.mpi_profile.model import CONTROL, PAYLOAD, Profile, RankProfile
from hvdkit.steps.ranks import name_ranks

_UNEVEN = 0.05
"""Imbalance from which on the ranks are not alike."""

NOT_SEEN = (
    "Only MPI is seen: what NCCL, Gloo or torch.distributed moved is not in here, nor what Horovod did between the "
    "calls ('hvdkit timeline' shows that)."
)
_LARGE_SHARE = 0.2
"""Of the time of the allreduces, from which on it is said whose time negotiation is."""
_WHOSE_TIME = (
    "This is the time of Horovod's background thread, which also negotiates while the training computes: it costs a "
    "core, and the step only what the step waits for."
)
_ENOUGH_CALLS = 100
"""Fewer say nothing about a habit."""

UNSEEN = (
    "Which rank's input or computation is late an MPI profile of Horovod does not show: record hvdkit launch "
    "--explain-job."
)


def causes(profile: Profile, shown: RankProfile) -> list[Cause]:
    """What costs time, on the rank that is shown, in no order; nothing where it is not known how long it ran."""
    if not shown.seconds:
        return []
    late = _late(profile, shown) or _waiting(shown)
    found = [_large(profile, shown), _small(profile, shown), late]
    return [cause for cause in found if cause is not None]


def gradients_elsewhere(shown: RankProfile) -> bool:
    """Whether Horovod negotiated over MPI and reduced over NCCL or Gloo."""
    sizes = [row.most_bytes or row.average_bytes or 0 for row in shown.of(PAYLOAD, "MPI_Allreduce")]
    return shown.horovod and max(sizes, default=0) <= NUMBER_BYTES


def otherwise(shown: RankProfile) -> str:
    """The verdict where no cause is worth a sentence."""
    if gradients_elsewhere(shown):
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
    return Cause(kind, lost, lost / (shown.seconds or 1.0), what, evidence, advice, per_step=False, ranks=ranks)


def _large(profile: Profile, shown: RankProfile) -> Cause | None:
    """The time of payload calls of at least 64 KiB on the shown rank, as a cause; None where there are none."""
    rows = [row for row in shown.of(PAYLOAD) if (row.average_bytes or 0) >= SMALL_BYTES]
    whole = measures.total(rows)
    lost = _moving(profile, shown, whole)
    if not rows:
        return None
    lines = [
        one
        for one in measures.sizes(profile, shown)
        if one.purpose == PAYLOAD and (one.average_bytes or 0) >= SMALL_BYTES and one.bus_bytes_per_s is not None
    ]
    most = max(lines, key=lambda line: line.seconds, default=None)
    evidence = f"rank {shown.rank}: {whole.calls:,} calls of at least 64 KiB"
    if most is not None:
        evidence += (
            f"; {most.calls:,} {most.routine} of {bytes_text(most.average_bytes or 0)} took "
            f"{duration_text(1e6 * most.seconds / most.calls)} each, {bytes_text(most.bus_bytes_per_s or 0)}/s of bus "
            "bandwidth"
        )
    what, advice = SENTENCES["large-tensors"]
    return _of_job("large-tensors", lost, shown, evidence, what, f"{advice} {HOW_MUCH_IS_HIDDEN}")


def _small(profile: Profile, shown: RankProfile) -> Cause | None:
    rows = [row for row in shown.of(PAYLOAD, "MPI_Allreduce") if (row.average_bytes or 0) < SMALL_BYTES]
    small = measures.total(rows)
    if not rows:
        return None
    evidence = f"rank {shown.rank}: {small.calls:,} allreduces below 64 KiB"
    return _of_job("small-tensors", _moving(profile, shown, small), shown, evidence, *SENTENCES["small-tensors"])


def _moving(profile: Profile, shown: RankProfile, calls: measures.Sums) -> float:
    """Seconds of these calls without the wait for later ranks: the rank that spends the least time in MPI has none."""
    if calls.wait_s or shown.horovod or not shown.mpi_seconds:
        return calls.seconds - (calls.wait_s or 0.0)
    least = min(dict(profile.mpi_seconds).values(), default=shown.mpi_seconds)
    return calls.seconds * min(1.0, least / shown.mpi_seconds)


def _waiting(shown: RankProfile) -> Cause | None:
    """Where --mpi-profile-wait measured it."""
    whole = measures.total(shown.of(PAYLOAD))
    if not whole.wait_s:
        return None
    evidence = f"barriers of --mpi-profile-wait, {share_text(whole.wait_s / whole.seconds)} of the time of data"
    what = f"Rank {shown.rank} waits in collectives until all ranks are there."
    return _of_job("late", whole.wait_s, shown, evidence, what, SENTENCES["late"][1])


def _late(profile: Profile, shown: RankProfile) -> Cause | None:
    """Collectives end together: the ranks that spend the least time in them mostly come last.

    Not so where Horovod negotiates in its own thread first: then nobody waits in the collectives themselves.
    """
    times = dict(profile.mpi_seconds)
    if shown.horovod or len(times) < 2:
        return None
    over = measures.spread(times)
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


@dataclass(frozen=True, slots=True)
class ProfileFinding:
    """What was found.

    Attributes:
        name: a word for programs, such as "negotiation".
        text: full sentences.
    """

    name: str
    text: str


def findings(profile: Profile, shown: RankProfile) -> list[ProfileFinding]:
    """All findings on the rank that is shown; those that do not apply are left out."""
    found = (_negotiation(profile, shown), _negotiation_waits(shown))
    return [finding for finding in found if finding is not None]


def _negotiation(profile: Profile, shown: RankProfile) -> ProfileFinding | None:
    """Horovod's bit vectors among the allreduces, and what would make them fewer."""
    rows = shown.of(CONTROL, "MPI_Allreduce")
    vectors = measures.total(rows)
    everything = measures.total(row for row in shown.calls if row.routine == "MPI_Allreduce")
    if not vectors.calls or everything.seconds <= 0:
        return None
    share = vectors.seconds / everything.seconds
    least = min(row.average_bytes or 0 if row.least_bytes is None else row.least_bytes for row in rows)
    most = max(row.average_bytes or 0 if row.most_bytes is None else row.most_bytes for row in rows)
    size = f"{least:.0f} bytes" if least == most else f"{least:.0f} to {most:.0f} bytes"
    how = "" if profile.certain(shown) else ", by its size and number"
    text = (
        f"{share_text(vectors.calls / everything.calls)} of the allreduces ({vectors.calls:,} of {everything.calls:,}) "
        f"are {size}: Horovod's negotiation{how}. On rank {shown.rank} they take {share_text(share)} "
        f"of the time of the allreduces ({_seconds(vectors.seconds)} of {_seconds(everything.seconds)})."
    )
    if share >= _LARGE_SHARE:
        text += f" {_WHOSE_TIME}"
    return ProfileFinding("negotiation", text)


def _negotiation_waits(shown: RankProfile) -> ProfileFinding | None:
    """A few bytes take microseconds; more is waiting for a rank that comes later, or for a core."""
    rows = shown.of(CONTROL, "MPI_Allreduce")
    vectors = measures.total(rows)
    if vectors.calls < _ENOUGH_CALLS:
        return None
    mean, fastest = vectors.seconds / vectors.calls, min((row.fastest_s or 0.0 for row in rows), default=0.0)
    if mean < 1e-4 or mean < 10 * fastest:
        return None
    at_best = f", {duration_text(1e6 * fastest)} at the fastest" if fastest else ""
    return ProfileFinding(
        "negotiation waits",
        f"A negotiation takes {duration_text(1e6 * mean)} on average{at_best}: so few bytes need microseconds, the "
        "rest is waiting for ranks that come later, or for a core where ranks have too few for the training and "
        "Horovod's thread.",
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else duration_text(1e6 * seconds)
