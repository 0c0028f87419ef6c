"""What costs the job of a profile time, weighed against the time that the job took.

Horovod negotiates in a thread of its own beside the training, in every cycle, whatever the training does: the time of
its negotiation is no step's time, and which rank's training is late cannot be seen in it.
"""

from __future__ import annotations

import numpy as np

from hvdkit.common.allreduce import NUMBER_BYTES, SMALL_BYTES
from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.errors import name_ranks
from hvdkit.observe import lateness
from hvdkit.read.causes import HOW_MUCH_IS_HIDDEN, SENTENCES, WHY_LATE, WORTH_SAYING, Cause
from hvdkit.read.mpi_profile import measures
from hvdkit.read.mpi_profile.model import PAYLOAD, Profile, RankProfile

_UNEVEN = 0.05
"""Imbalance from which on the ranks are not alike."""

NOT_SEEN = (
    "Only MPI is seen: what NCCL, Gloo or torch.distributed moved is not in here, nor what Horovod did between the "
    "calls ('hvdkit timeline' shows that)."
)
WHOSE_TIME = (
    "Control is Horovod's negotiation, in a thread of its own, also while the training computes: it costs a core, and "
    "the step only what the step waits for."
)
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
    hidden = shown.horovod and kind != "late"
    share = lost / (shown.seconds or 1.0)
    return Cause(kind, lost, share, what, evidence, advice, per_step=False, ranks=ranks, at_most=hidden)


def _large(profile: Profile, shown: RankProfile) -> Cause | None:
    """The time of payload calls of at least 64 KiB on the shown rank."""
    rows = [row for row in shown.of(PAYLOAD) if (row.average_bytes or 0) >= SMALL_BYTES]
    whole = measures.total(rows)
    lost = _moving(profile, shown, whole)
    if not rows:
        return None
    lines = [
        line
        for line in measures.sizes(profile, shown)
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
    small = measures.total(rows)
    if not rows:
        return None
    evidence = f"rank {shown.rank}: {small.calls:,} allreduces below 64 KiB"
    return _of_job("small-tensors", _moving(profile, shown, small), shown, evidence, *SENTENCES["small-tensors"])


def _moving(profile: Profile, shown: RankProfile, calls: measures.Sums) -> float:
    """Seconds without the wait for later ranks: the rank that spends the least time in MPI has none."""
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
    """Collectives end together: who spends the least time in them mostly comes last; not under Horovod's thread."""
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
