"""A profile as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hvdkit.common.causes import Cause, dearest_first
from hvdkit.common.json_files import Document, Part
from hvdkit.read.mpi_profile import measures
from hvdkit.read.mpi_profile.causes import NOT_SEEN, ProfileFinding, causes, findings
from hvdkit.read.mpi_profile.model import Calls, Profile
from hvdkit.read.mpi_profile.traffic import Traffic

_GUESSED = (
    "These files have sizes alone, by which Horovod's negotiation is told from data; its responses, one more broadcast "
    "for each gather, are counted as data."
)


def notes(profile: Profile, shown: Traffic) -> list[str]:
    """What a reader should know, full sentences."""
    found = [profile.missing_text] if profile.missing else []
    if shown.horovod and not shown.certain:
        found.append(_GUESSED)
    return [*found, *profile.notes, NOT_SEEN]


class Purposes(Part, frozen=True):
    """What the rank that is shown spent on each purpose.

    Attributes:
        certain: control is known, not told from payload by size and number.
        horovod: Horovod negotiated over MPI.
        payload, control, synchronisation, management: each.
    """

    certain: bool
    horovod: bool
    payload: measures.Sums
    control: measures.Sums
    synchronisation: measures.Sums
    management: measures.Sums


class WithPurpose(Calls, frozen=True, kw_only=True):
    """Calls of a rank that are alike: of one routine, caller, operation, type and range of sizes.

    Attributes:
        purpose: as in ``Size``.
    """

    purpose: str


class OneRank(Part, frozen=True):
    """What one rank recorded.

    Attributes:
        rank: its number.
        state: how the record ends: "finalized", "exited", "aborted" or "running".
        seconds: from MPI_Init to the end of the record.
        mpi_seconds: in MPI.
        calls: what it called.
    """

    rank: int
    state: str
    seconds: float | None
    mpi_seconds: float
    calls: tuple[WithPurpose, ...]


class ShownProfile(Document, frozen=True):
    """What MPI did in a job, whatever recorded it; None is what the files do not say.

    Attributes:
        source: what recorded it: "hvdkit", "mpitrace" or "mpiP".
        library: the MPI; "" where it is not known.
        size: ranks of the job.
        missing: ranks without a record.
        mpi_seconds: in MPI, over every rank that a file tells it of.
        shown_rank: routines, sizes, traffic and findings are of this rank.
        routines, sizes: in the order of time.
        traffic: by purpose.
        ranks: all that there is a record of.
        causes: what costs the job time, the one that costs the largest share first.
        findings: what stands out.
        notes: what a reader should know, full sentences.
    """

    kind = "mpi-profile"
    schema = 2
    written_by = "hvdkit mpi-profile show --json"

    source: str
    library: str
    size: int
    missing: tuple[int, ...]
    mpi_seconds: measures.Spread | None
    shown_rank: int
    routines: tuple[measures.Routine, ...]
    sizes: tuple[measures.Size, ...]
    traffic: Purposes
    ranks: tuple[OneRank, ...]
    causes: tuple[Cause, ...]
    findings: tuple[ProfileFinding, ...]
    notes: tuple[str, ...]


def shown_as(profile: Profile, traffic: Sequence[Traffic], shown: Traffic) -> ShownProfile:
    """The profile with all that is said of it.

    Args:
        traffic: of every rank.
        shown: of the rank that routines, sizes and findings are about.
    """
    return ShownProfile(
        source=profile.source,
        library=profile.library,
        size=profile.size,
        missing=tuple(profile.missing),
        mpi_seconds=measures.spread(dict(profile.mpi_seconds)) if profile.mpi_seconds else None,
        shown_rank=shown.rank.rank,
        routines=tuple(measures.routines(profile, shown)),
        sizes=tuple(measures.sizes(profile, shown)),
        traffic=Purposes(shown.certain, shown.horovod, **measures.purposes(shown)),
        ranks=tuple(_rank(one) for one in traffic),
        causes=tuple(dearest_first(causes(profile, shown))),
        findings=tuple(findings(shown)),
        notes=tuple(notes(profile, shown)),
    )


def _rank(traffic: Traffic) -> OneRank:
    rank = traffic.rank
    calls = tuple(WithPurpose(**msgspec.structs.asdict(row), purpose=purpose) for row, purpose in traffic.calls)
    return OneRank(rank.rank, rank.state, rank.seconds, rank.mpi_seconds, calls)
