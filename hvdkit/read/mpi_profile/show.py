"""A profile and a comparison as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hvdkit.common.units import bytes_text, duration_text, printable
from hvdkit.read.mpi_profile import findings, measures, results
from hvdkit.read.mpi_profile.comparison import Compared
from hvdkit.read.mpi_profile.model import Profile
from hvdkit.read.mpi_profile.traffic import CONTROL, Traffic


def show(profile: Profile, traffic: Traffic, console: Console) -> None:
    """Print what the rank of ``traffic`` did, how far the ranks differ, and what was found."""
    rank = traffic.rank
    elapsed = "" if rank.seconds is None else f" of {rank.seconds:.3f} s"
    library = f", {printable(profile.library)}" if profile.library else ""
    console.print(
        f"Rank {rank.rank} of {profile.size} ({len(profile.ranks)} recorded by {profile.source}{library}): "
        f"{rank.mpi_seconds:.3f} s{elapsed} in MPI",
        soft_wrap=True,
    )
    console.print(_routines(profile, traffic))
    console.print(_sizes(profile, traffic))
    console.print(_purposes(traffic))
    if len(profile.mpi_seconds) > 1:
        over = measures.spread(dict(profile.mpi_seconds))
        console.print(
            f"In MPI, over {len(profile.mpi_seconds)} ranks: least {over.least:.3f} s (rank {over.least_rank}), median "
            f"{over.median:.3f} s, most {over.most:.3f} s (rank {over.most_rank}), imbalance "
            f"{100 * over.imbalance:.1f} %",
            soft_wrap=True,
        )
    for finding in findings.find(profile, traffic):
        console.print(f"- {finding.text}", soft_wrap=True)
    for note in results.notes(profile, traffic):
        console.print(f"Note: {printable(note)}", soft_wrap=True)


def show_compared(compared: Sequence[Compared], remarks: Sequence[str], console: Console) -> None:
    """Print two profiles side by side."""
    table = _table("Medians over the ranks, what differs most first", ("routine", "purpose"))
    for name in ("A calls", "B calls", "A bytes", "B bytes", "A s", "B s", "B / A"):
        table.add_column(name, justify="right")
    for one in compared:
        table.add_row(
            printable(one.routine),
            one.purpose,
            f"{one.a.calls:g}",
            f"{one.b.calls:g}",
            _bytes(one.a.bytes),
            _bytes(one.b.bytes),
            f"{one.a.seconds:.3f}",
            f"{one.b.seconds:.3f}",
            "-" if one.ratio is None else f"{one.ratio:.2f}",
        )
    console.print(table)
    for remark in (*remarks, findings.NOT_SEEN):
        console.print(f"Note: {printable(remark)}", soft_wrap=True)


def _table(title: str, texts: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in texts:
        table.add_column(name, overflow="fold")
    return table


def _routines(profile: Profile, traffic: Traffic) -> Table:
    several = len(profile.ranks) > 1
    spread = ("least", "median", "most", "imbalance") if several else ()
    title = f"Routines on rank {traffic.rank.rank}" + (", and their seconds over the ranks" if several else "")
    table = _table(title, ("MPI routine",))
    for name in ("#calls", "avg. bytes", "time (s)", *spread):
        table.add_column(name, justify="right")
    for one in measures.routines(profile, traffic):
        over = one.seconds
        words = [f"{over.least:.3f}", f"{over.median:.3f}", f"{over.most:.3f}", f"{100 * over.imbalance:.1f} %"]
        average = one.total.average_bytes
        table.add_row(
            printable(one.name),
            str(one.total.calls),
            "-" if average is None else f"{average:.1f}",
            f"{one.total.seconds:.3f}",
            *(words if several else ()),
        )
    return table


def _sizes(profile: Profile, traffic: Traffic) -> Table:
    lines = [one for one in measures.sizes(profile, traffic) if one.total.bytes]
    waits = any(one.total.wait_s is not None for one in lines)
    table = _table("By size of a call", ("MPI routine", "purpose", "bytes"))
    for name in ("#calls", "time (s)", *(("waiting",) if waits else ()), "each", "busbw"):
        table.add_column(name, justify="right")
    for one in lines:
        each = duration_text(1e6 * one.total.seconds / one.total.calls) if one.total.seconds else "-"
        wait = "-" if one.total.wait_s is None else f"{one.total.wait_s:.3f}"
        speed = one.bus_bytes_per_s if one.purpose != CONTROL else None
        table.add_row(
            printable(one.routine),
            one.purpose,
            _range(one),
            str(one.total.calls),
            f"{one.total.seconds:.3f}",
            *((wait,) if waits else ()),
            each,
            "-" if speed is None else f"{bytes_text(speed)}/s",
        )
    return table


def _purposes(traffic: Traffic) -> Table:
    table = _table("What it was for", ("purpose",))
    for name in ("#calls", "bytes", "time (s)", "share"):
        table.add_column(name, justify="right")
    whole = traffic.rank.mpi_seconds
    for purpose, total in measures.purposes(traffic).items():
        share = "-" if whole <= 0 else f"{100 * total.seconds / whole:.1f} %"
        table.add_row(purpose, str(total.calls), _bytes(total.bytes), f"{total.seconds:.3f}", share)
    return table


def _range(one: measures.Sizes) -> str:
    """One size, a range, or an average."""
    if one.least_bytes is None or one.most_bytes is None:
        return f"{one.total.average_bytes or 0:.1f}"
    if one.least_bytes == one.most_bytes:
        return f"{one.least_bytes:.0f}"
    return f"{one.least_bytes:.0f}-{one.most_bytes:.0f}"


def _bytes(size: float | None) -> str:
    return "-" if size is None else bytes_text(size)
