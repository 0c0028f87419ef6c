"""``hvdkit watch``."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import click
from rich.console import Group
from rich.live import Live

from hvdkit.common.commands import PATH, print_any_name
from hvdkit.common.table import console
from hvdkit.jobs.watch import view
from hvdkit.jobs.watch.history import Run

_COLUMNS = 80
"""Of what is no terminal, where COLUMNS does not say."""
_INTERVAL_S = 1.0


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.option("--once", is_flag=True, help="Show the current state once and exit, on a terminal, too.")
def watch(directory: Path, once: bool) -> int:
    """Show a training while it runs, or after it: progress, speed, loss, stragglers, memory, checkpoints, reports.

    DIR is what was given to `hk.Monitor` or `hvdkit launch --monitor`. Only its files are read, so this works on any
    host that sees them. On a terminal the view stays and changes until the job has ended, or Ctrl-C; elsewhere it is
    printed once.

    \b
    Examples:
      hvdkit watch runs/digits
      hvdkit watch runs/digits --once

    Exit status: 0 success, 1 DIR holds no history that can be read, 2 for bad usage.
    """
    print_any_name()
    run, shown = Run(directory), console()
    if not shown.is_terminal and "COLUMNS" not in os.environ:
        shown.width = _COLUMNS

    def now() -> Group:
        run.read()
        return Group(*view.lines(run, time.time(), shown.width))

    block = now()
    if once or not shown.is_terminal or shown.is_dumb_terminal:
        shown.print(block)
    else:
        with contextlib.suppress(KeyboardInterrupt), Live(block, console=shown, auto_refresh=False) as live:
            while not run.ended:
                time.sleep(_INTERVAL_S)
                live.update(now(), refresh=True)
    return 0
