"""The command ``hvdkit trace``: a table of subcommands, each imported when it is used."""

from __future__ import annotations

import click

from hvdkit.common.commands import group_of, print_any_name

SUBCOMMANDS = {
    "summary": ("hvdkit.read.trace.commands:summary", "Operators, communication, data loading, memory, rank by rank."),
}


@click.group(cls=group_of(SUBCOMMANDS, moved={"diff": "hvdkit diff A B"}))
def trace() -> None:
    """Read traces of PyTorch's profiler: what is a step spent on, and what does communication cost?

    Reads what torch.profiler exports with export_chrome_trace, with or without GPUs, also compressed with gzip.

    \b
      hvdkit launch -n 2 --torch-profile profile -- python train.py
      hvdkit trace summary profile

    Each subcommand has its own --help with an example.
    """
    print_any_name()
