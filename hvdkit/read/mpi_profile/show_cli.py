"""``hvdkit mpi-profile show``."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.common.commands import AT_LEAST_0
from hvdkit.errors import InvalidArgumentError
from hvdkit.read.mpi_profile import reading, results
from hvdkit.read.mpi_profile import show as tables
from hvdkit.read.mpi_profile import traffic as purposes
from hvdkit.read.mpi_profile.model import Profile
from hvdkit.read.mpi_profile.traffic import Traffic

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
    tables.page(profile, shown).print(form, results.shown_as(profile, traffic, shown))
    return 0


def _shown(profile: Profile, traffic: tuple[Traffic, ...], number: int | None) -> Traffic:
    shown = next((one for one in traffic if number in (None, one.rank.rank)), None)
    if shown is not None:
        return shown
    there = ", ".join(str(rank.rank) for rank in profile.ranks[:16]) + (", ..." if len(profile.ranks) > 16 else "")
    raise InvalidArgumentError(f"--rank {number} left no record; there are those of {there} of {profile.size} ranks.")
