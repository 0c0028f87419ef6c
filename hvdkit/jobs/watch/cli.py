"""``hvdkit watch``."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import click
from rich.console import Group
from rich.live import Live

from hvdkit.common import json_files
from hvdkit.common.commands import PATH, seconds_above_0
from hvdkit.common.table import console
from hvdkit.jobs.watch import view
from hvdkit.jobs.watch.history import Reader
from hvdkit.jobs.watch.results import Watched, look

_COLUMNS = 80
"""Of what is no terminal, where COLUMNS does not say."""


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.option("--once", is_flag=True, help="Show the current state once and exit, on a terminal, too.")
@click.option("--json", "want_json", is_flag=True, help="Print the current state as JSON and exit.")
@click.option(
    "--interval", type=float, default=1.0, callback=seconds_above_0, metavar="S", help="Seconds between two updates."
)
def watch(directory: Path, once: bool, want_json: bool, interval: float) -> int:
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
    reader, shown = Reader(directory), console()
    if not shown.is_terminal and "COLUMNS" not in os.environ:
        shown.width = _COLUMNS

    def now() -> tuple[Watched, Group]:
        run = reader.read()
        seen = look(run, str(reader.path), time.time())
        lines = view.lines(seen, run.windows, shown.width)
        return seen, Group(*(lines if shown.encoding.lower().startswith("utf") else view.plain(lines)))

    seen, block = now()
    if want_json:
        click.echo(json_files.encode(seen), nl=False)
    elif once or not shown.is_terminal or shown.is_dumb_terminal:
        shown.print(block)
    else:
        with contextlib.suppress(KeyboardInterrupt), Live(block, console=shown, auto_refresh=False) as live:
            while seen.state != "ended":
                time.sleep(interval)
                seen, block = now()
                live.update(block, refresh=True)
    return 0
