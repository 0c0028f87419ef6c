"""A profile as tables for people."""

from __future__ import annotations

from hvdkit.common.causes import verdict
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.read.mpi_profile import measures, results
from hvdkit.read.mpi_profile.causes import UNSEEN, causes, findings, otherwise
from hvdkit.read.mpi_profile.model import Profile
from hvdkit.read.mpi_profile.traffic import CONTROL, Traffic


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
    return Page([*found, *(f"Note: {note}" for note in results.notes(profile, traffic))])


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
