"""``hvdkit mpi-profile``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from hvdkit.common.commands import AT_LEAST_0, group_of
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.read.causes import verdict
from hvdkit.read.mpi_profile import reading, results
from hvdkit.read.mpi_profile.model import CONTROL, Profile, RankProfile
from hvdkit.read.mpi_profile.results import UNSEEN, ShownProfile, otherwise, shown_as

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


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="DIR|FILE...")
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
    cells: dict[str, Callable[[results.Routine], object]] = {
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


def _range(one: results.Size) -> str:
    if one.least_bytes is None or one.most_bytes is None:
        return f"{one.average_bytes or 0:.1f}"
    if one.least_bytes == one.most_bytes:
        return f"{one.least_bytes:.0f}"
    return f"{one.least_bytes:.0f}-{one.most_bytes:.0f}"


_SIZES: dict[str, Callable[[results.Size], object]] = {
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
