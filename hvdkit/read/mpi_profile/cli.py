"""``hvdkit mpi-profile``: a table of subcommands, each imported when it is used."""

from __future__ import annotations

import click

from hvdkit.common.commands import group_of

SUBCOMMANDS = {
    "show": (
        "hvdkit.read.mpi_profile.show:show",
        "Print routines, sizes, control and payload, findings.",
    ),
}


@click.group(cls=group_of(SUBCOMMANDS, moved={"compare": "hvdkit diff A B"}))
def mpi_profile() -> None:
    """Read MPI profiles of every rank: calls, bytes and time by routine and size.

    Profiles are recorded by `hvdkit launch --mpi-profile DIR`; those of IBM's mpitrace and of mpiP are read, too. MPI
    alone is seen, not what goes over NCCL or Gloo.

    \b
      hvdkit launch -n 2 --mpi-profile profile -- python train.py
      hvdkit mpi-profile show profile

    Each subcommand has its own --help with an example.
    """
