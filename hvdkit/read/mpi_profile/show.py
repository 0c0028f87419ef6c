"""``hvdkit mpi-profile show``: a profile as JSON and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from hvdkit.common.causes import Cause, dearest_first, verdict
from hvdkit.common.commands import AT_LEAST_0
from hvdkit.common.json_files import Document, Part
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.read.mpi_profile import measures, reading
from hvdkit.read.mpi_profile import traffic as purposes
from hvdkit.read.mpi_profile.causes import NOT_SEEN, UNSEEN, ProfileFinding, causes, findings, otherwise
from hvdkit.read.mpi_profile.model import Calls, Profile
from hvdkit.read.mpi_profile.traffic import CONTROL, Traffic

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


def page(profile: Profile, traffic: Traffic) -> Page:
    """The verdict, what the rank of ``traffic`` did, how far the ranks differ, and what was found."""
    rank = traffic.rank
    elapsed = "" if rank.seconds is None else f" of {rank.seconds:.3f} s"
    library = f", {profile.library}" if profile.library else ""
    first = verdict(causes(profile, traffic), otherwise(traffic))
    found: list[Table | str] = [
        *first,
        *([UNSEEN] if traffic.horovod and len(first) > 1 else []),
        "",
        f"Rank {rank.rank} of {profile.size} ({len(profile.ranks)} recorded by {profile.source}{library}): "
        f"{rank.mpi_seconds:.3f} s{elapsed} in MPI",
        _routines(profile, traffic),
        _sizes(profile, traffic),
        _purposes(traffic),
    ]
    if len(profile.mpi_seconds) > 1:
        over = measures.spread(dict(profile.mpi_seconds))
        found.append(
            f"In MPI, over {len(profile.mpi_seconds)} ranks: least {over.least:.3f} s (rank {over.least_rank}), median "
            f"{over.median:.3f} s, most {over.most:.3f} s (rank {over.most_rank}), imbalance "
            f"{share_text(over.imbalance)}"
        )
    found += [f"- {finding.text}" for finding in findings(traffic)]
    return Page([*found, *(f"Note: {note}" for note in notes(profile, traffic))])


def _routines(profile: Profile, traffic: Traffic) -> Table:
    several = len(profile.ranks) > 1
    spread = ("least", "median", "most", "imbalance") if several else ()
    title = f"Routines on rank {traffic.rank.rank}" + (", and their seconds over the ranks" if several else "")
    rows = []
    for one in measures.routines(profile, traffic):
        over = one.ranks
        words = [f"{over.least:.3f}", f"{over.median:.3f}", f"{over.most:.3f}", f"{share_text(over.imbalance)}"]
        average = None if one.average_bytes is None else f"{one.average_bytes:.1f}"
        rows.append(
            [one.routine, one.calls, average, f"{one.seconds:.3f}", *(words if several else ())],
        )
    return Table(title, ("MPI routine", "#calls", "avg. bytes", "time (s)", *spread), rows, left=("MPI routine",))


def _sizes(profile: Profile, traffic: Traffic) -> Table:
    lines = [one for one in measures.sizes(profile, traffic) if one.bytes]
    waits = any(one.wait_s is not None for one in lines)
    rows = []
    for one in lines:
        each = duration_text(1e6 * one.seconds / one.calls) if one.seconds else None
        wait = None if one.wait_s is None else f"{one.wait_s:.3f}"
        speed = one.bus_bytes_per_s if one.purpose != CONTROL else None
        busbw = None if speed is None else f"{bytes_text(speed)}/s"
        times = [f"{one.seconds:.3f}", *((wait,) if waits else ()), each, busbw]
        rows.append([one.routine, one.purpose, _range(one), one.calls, *times])
    left = ("MPI routine", "purpose", "bytes")
    names = (*left, "#calls", "time (s)", *(("waiting",) if waits else ()), "each", "busbw")
    return Table("By size of a call", names, rows, left)


def _purposes(traffic: Traffic) -> Table:
    whole = traffic.rank.mpi_seconds
    rows = [
        [
            purpose,
            total.calls,
            _bytes(total.bytes),
            f"{total.seconds:.3f}",
            None if whole <= 0 else share_text(total.seconds / whole),
        ]
        for purpose, total in measures.purposes(traffic).items()
    ]
    return Table("What it was for", ("purpose", "#calls", "bytes", "time (s)", "share"), rows, left=("purpose",))


def _range(one: measures.Size) -> str:
    """One size, a range, or an average."""
    if one.least_bytes is None or one.most_bytes is None:
        return f"{one.average_bytes or 0:.1f}"
    if one.least_bytes == one.most_bytes:
        return f"{one.least_bytes:.0f}"
    return f"{one.least_bytes:.0f}-{one.most_bytes:.0f}"


def _bytes(size: float | None) -> str | None:
    return None if size is None else bytes_text(size)


_PATH = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=_PATH, metavar="DIR|FILE...")
@click.option("--rank", "number", type=AT_LEAST_0, metavar="R", help="The rank to show  [default: the lowest there is]")
@click.option("--json", "form", flag_value="json", help="Print JSON; times in seconds.")
def show(paths: tuple[Path, ...], number: int | None, form: str | None) -> int:
    """Print which MPI routines the ranks of a job called, for how long, and what stands out.

    DIR is that of `hvdkit launch --mpi-profile DIR`; or give the files mpi_profile.* of IBM's mpitrace, or one report
    of mpiP. Tables are of one rank, with the least, median and most time over all ranks. Control is Horovod's
    negotiation, payload what it, or another program, sends. Bus bandwidth counts as nccl-tests do: 2 (n-1) / n x bytes
    / time of an allreduce.

    \b
    Examples:
      hvdkit mpi-profile show profile
      hvdkit mpi-profile show profile --rank 3 --json
      hvdkit mpi-profile show mpi_profile.2500161.*
      hvdkit mpi-profile show train.8.4711.1.mpiP

    Exit status: 0 success, 1 a profile cannot be used, 2 for bad usage.
    """
    profile = reading.read(paths)
    traffic = purposes.of_profile(profile)
    shown = _shown(profile, traffic, number)
    page(profile, shown).print(form, shown_as(profile, traffic, shown))
    return 0


def _shown(profile: Profile, traffic: tuple[Traffic, ...], number: int | None) -> Traffic:
    shown = next((one for one in traffic if number in (None, one.rank.rank)), None)
    if shown is not None:
        return shown
    there = ", ".join(str(rank.rank) for rank in profile.ranks[:16]) + (", ..." if len(profile.ranks) > 16 else "")
    raise InvalidArgumentError(f"--rank {number} left no record; there are those of {there} of {profile.size} ranks.")
