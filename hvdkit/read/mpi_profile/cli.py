"""``hvdkit mpi-profile``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from hvdkit.common.commands import AT_LEAST_0, group_of
from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.read.causes import Cause, by_cost, verdict
from hvdkit.read.mpi_profile import measures, reading
from hvdkit.read.mpi_profile.causes import NOT_SEEN, UNSEEN, WHOSE_TIME, causes, otherwise
from hvdkit.read.mpi_profile.model import CONTROL, HVDKIT, PURPOSES, Profile, RankProfile

SUBCOMMANDS = {
    "show": ("hvdkit.read.mpi_profile.cli:show", "Print routines, sizes, control and payload."),
}


@click.group(cls=group_of(SUBCOMMANDS, moved={"compare": "hvdkit diff A B"}))
def mpi_profile() -> None:
    """Read MPI profiles of every rank: calls, bytes and time by routine and size.

    Profiles are recorded by `hvdkit launch --mpi-profile DIR`; those of IBM's mpitrace are read, too. MPI alone
    is seen, not what goes over NCCL or Gloo.

    \b
      hvdkit launch -n 2 --mpi-profile profile -- python train.py
      hvdkit mpi-profile show profile

    Each subcommand has its own --help with an example.
    """


_PATH = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=_PATH, metavar="DIR|FILE...")
@click.option("--rank", "number", type=AT_LEAST_0, metavar="R", help="The rank to show  [default: the lowest there is]")
@click.option("--json", "form", flag_value="json", help="Print JSON; times in seconds.")
def show(paths: tuple[Path, ...], number: int | None, form: str | None) -> int:
    """Print which MPI routines the ranks of a job called, for how long, and what stands out.

    DIR is that of `hvdkit launch --mpi-profile DIR`; or give the files mpi_profile.* of IBM's mpitrace.
    Tables are of one rank, with the least, median and most time over all ranks. Control is Horovod's
    negotiation, payload what it, or another program, sends. Bus bandwidth counts as nccl-tests do: 2 (n-1) / n x bytes
    / time of an allreduce.

    \b
    Examples:
      hvdkit mpi-profile show profile
      hvdkit mpi-profile show profile --rank 3 --json
      hvdkit mpi-profile show mpi_profile.2500161.*

    Exit status: 0 success, 1 a profile cannot be used, 2 for bad usage.
    """
    profile = reading.read(paths)
    shown = next((rank for rank in profile.ranks if number in (None, rank.rank)), None)
    if shown is None:
        there = ", ".join(str(rank.rank) for rank in profile.ranks[:16]) + (", ..." if len(profile.ranks) > 16 else "")
        raise InvalidArgumentError(
            f"--rank {number} left no record; there are those of {there} of {profile.size} ranks."
        )
    found = shown_as(profile, shown)
    page(profile, shown, found).print(form, found)
    return 0


_GUESSED = (
    "These files have sizes alone, by which Horovod's negotiation is told from data; its responses, one more broadcast "
    "for each gather, are counted as data."
)


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
    mpi_seconds: measures.Spread | None
    shown_rank: int
    routines: tuple[measures.Routine, ...]
    sizes: tuple[measures.Size, ...]
    certain: bool
    traffic: dict[str, measures.Sums]
    ranks: tuple[RankProfile, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]


def shown_as(profile: Profile, shown: RankProfile) -> ShownProfile:
    """The profile with all that is said of it; ``shown``: the rank that routines and sizes are about."""
    certain = profile.source == HVDKIT
    notes = [profile.missing_text] if profile.missing else []
    if shown.horovod:
        notes.append(WHOSE_TIME)
    if shown.horovod and not certain:
        notes.append(_GUESSED)
    return ShownProfile(
        source=profile.source,
        library=profile.library,
        size=profile.size,
        missing=profile.missing,
        mpi_seconds=measures.spread(dict(profile.mpi_seconds)) if profile.mpi_seconds else None,
        shown_rank=shown.rank,
        routines=tuple(measures.routines(profile, shown)),
        sizes=tuple(measures.sizes(profile, shown)),
        certain=certain,
        traffic={name: measures.total(shown.of(name)) for name in PURPOSES},
        ranks=profile.ranks,
        causes=tuple(by_cost(causes(profile, shown))),
        notes=(*notes, *profile.notes, NOT_SEEN),
    )


def page(profile: Profile, shown: RankProfile, found: ShownProfile) -> Page:
    """The verdict, what the rank that is shown did, and how far the ranks differ."""
    elapsed = "" if shown.seconds is None else f" of {shown.seconds:.3f} s"
    library = f", {profile.library}" if profile.library else ""
    first = verdict(found.causes, otherwise(shown))
    purposes = [
        (
            name,
            one.calls,
            None if one.bytes is None else bytes_text(one.bytes),
            f"{one.seconds:.3f}",
            share_text(one.seconds / shown.mpi_seconds) if shown.mpi_seconds > 0 else None,
        )
        for name, one in found.traffic.items()
    ]
    parts: list[Table | str] = [
        *first,
        *([UNSEEN] if shown.horovod and len(first) > 1 else []),
        "",
        f"Rank {shown.rank} of {profile.size} ({len(profile.ranks)} recorded by {profile.source}{library}): "
        f"{shown.mpi_seconds:.3f} s{elapsed} in MPI",
        _routines(found, several=len(profile.ranks) > 1),
        Table.of([one for one in found.sizes if one.bytes], _SIZES, list(_SIZES)[:3], "By size of a call"),
        Table("What it was for", ("purpose", "#calls", "bytes", "time (s)", "share"), purposes, ("purpose",)),
    ]
    if len(profile.mpi_seconds) > 1 and found.mpi_seconds is not None:
        over = found.mpi_seconds
        parts.append(
            f"In MPI, over {len(profile.mpi_seconds)} ranks: least {over.least:.3f} s (rank {over.least_rank}), median "
            f"{over.median:.3f} s, most {over.most:.3f} s (rank {over.most_rank}), imbalance "
            f"{share_text(over.imbalance)}"
        )
    return Page([*parts, *(f"Note: {note}" for note in found.notes)])


def _routines(found: ShownProfile, *, several: bool) -> Table:
    cells: dict[str, Callable[[measures.Routine], object]] = {
        "MPI routine": lambda one: one.routine,
        "#calls": lambda one: one.calls,
        "avg. bytes": lambda one: None if one.average_bytes is None else f"{one.average_bytes:.1f}",
        "time (s)": lambda one: f"{one.seconds:.3f}",
    }
    title = f"Routines on rank {found.shown_rank}"
    if several:
        title += ", and their seconds over the ranks"
        cells |= {
            "least": lambda one: f"{one.ranks.least:.3f}",
            "median": lambda one: f"{one.ranks.median:.3f}",
            "most": lambda one: f"{one.ranks.most:.3f}",
            "imbalance": lambda one: share_text(one.ranks.imbalance),
        }
    return Table.of(found.routines, cells, title=title)


def _range(one: measures.Size) -> str:
    if one.least_bytes is None or one.most_bytes is None:
        return f"{one.average_bytes or 0:.1f}"
    if one.least_bytes == one.most_bytes:
        return f"{one.least_bytes:.0f}"
    return f"{one.least_bytes:.0f}-{one.most_bytes:.0f}"


_SIZES: dict[str, Callable[[measures.Size], object]] = {
    "MPI routine": lambda one: one.routine,
    "purpose": lambda one: one.purpose,
    "bytes": _range,
    "#calls": lambda one: one.calls,
    "time (s)": lambda one: f"{one.seconds:.3f}",
    "waiting": lambda one: None if one.wait_s is None else f"{one.wait_s:.3f}",
    "each": lambda one: duration_text(1e6 * one.seconds / one.calls) if one.seconds else None,
    "busbw": lambda one: (
        None if one.bus_bytes_per_s is None or one.purpose == CONTROL else f"{bytes_text(one.bus_bytes_per_s)}/s"
    ),
}
