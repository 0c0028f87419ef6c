"""What stands out in a profile, in sentences with its numbers; what costs time is in ``causes``."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.common.units import duration_text, share_text
from hvdkit.read.mpi_profile import measures
from hvdkit.read.mpi_profile.traffic import CONTROL, Traffic

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


@dataclass(frozen=True, slots=True)
class ProfileFinding:
    """What was found.

    Attributes:
        name: a word for programs, such as "negotiation".
        text: full sentences.
    """

    name: str
    text: str


def find(traffic: Traffic) -> list[ProfileFinding]:
    """All findings, for the rank of ``traffic``; those that do not apply are left out."""
    return [finding for check in (_negotiation, _negotiation_waits) if (finding := check(traffic)) is not None]


def _negotiation(traffic: Traffic) -> ProfileFinding | None:
    """Horovod's bit vectors among the allreduces, and what would make them fewer."""
    vectors = measures.total(traffic.of(CONTROL, "MPI_Allreduce"))
    everything = measures.total(row for row in traffic.rank.calls if row.routine == "MPI_Allreduce")
    if not vectors.calls or everything.seconds <= 0:
        return None
    share = vectors.seconds / everything.seconds
    how = "" if traffic.certain else ", by its size and number"
    text = (
        f"{share_text(vectors.calls / everything.calls)} of the allreduces ({vectors.calls:,} of {everything.calls:,}) "
        f"are {_size(traffic)}: Horovod's negotiation{how}. On rank {traffic.rank.rank} they take {share_text(share)} "
        f"of the time of the allreduces ({_seconds(vectors.seconds)} of {_seconds(everything.seconds)})."
    )
    if share >= _LARGE_SHARE:
        text += f" {_WHOSE_TIME}"
    return ProfileFinding("negotiation", text)


def _size(traffic: Traffic) -> str:
    """The sizes of the bit vectors: "16 bytes", or "8 to 16 bytes"."""
    rows = traffic.of(CONTROL, "MPI_Allreduce")
    least = min(row.average_bytes or 0 if row.least_bytes is None else row.least_bytes for row in rows)
    most = max(row.average_bytes or 0 if row.most_bytes is None else row.most_bytes for row in rows)
    return f"{least:.0f} bytes" if least == most else f"{least:.0f} to {most:.0f} bytes"


def _negotiation_waits(traffic: Traffic) -> ProfileFinding | None:
    """A few bytes take microseconds; more is waiting for a rank that comes later, or for a core."""
    rows = traffic.of(CONTROL, "MPI_Allreduce")
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
