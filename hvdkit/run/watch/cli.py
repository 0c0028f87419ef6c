"""``hvdkit watch``."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live

from hvdkit.common import json_files
from hvdkit.common.commands import PATH, output_file, seconds_above_0
from hvdkit.common.table import console
from hvdkit.run.watch import view
from hvdkit.run.watch.history import HistoryWindow, Reader
from hvdkit.run.watch.results import Watched, look

_COLUMNS = 80
"""Of what is no terminal, where COLUMNS does not say."""


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.option("--once", is_flag=True, help="Show the current state once and exit.")
@click.option("--json", "want_json", is_flag=True, help="Print the current state as JSON and exit.")
@click.option(
    "--html", type=PATH, callback=output_file, metavar="FILE", help="Write the current state as one HTML file and exit."
)
@click.option(
    "--interval", type=float, default=1.0, callback=seconds_above_0, metavar="S", help="Seconds between two updates."
)
def watch(directory: Path, once: bool, want_json: bool, html: Path | None, interval: float) -> int:
    """Show a training while it runs, or after it: progress, speed, loss, stragglers, memory, checkpoints, reports.

    DIR is what was given to `hk.Monitor` or `hvdkit launch --monitor`. Only its files are read, so this works on any
    host that sees them. On a terminal the view stays and changes; elsewhere each change is printed below the last.
    It ends when the job has ended, or with Ctrl-C.

    \b
    Examples:
      hvdkit watch runs/digits
      hvdkit watch runs/digits --once
      hvdkit watch runs/digits --html digits.html

    Exit status: 0 success, 1 DIR holds no history that can be read, 2 for bad usage.
    """
    reader = Reader(directory)
    seen, windows = _look(reader)
    if html is not None:
        view.write_page(seen, windows, html)
        click.echo(f"hvdkit watch: written to {html}", err=True)
    if want_json:
        click.echo(json_files.encode(seen), nl=False)
    elif html is None:
        shown = console()
        if not shown.is_terminal and "COLUMNS" not in os.environ:
            shown.width = _COLUMNS
        with contextlib.suppress(KeyboardInterrupt):
            if once:
                shown.print(_block(seen, windows, shown))
            elif shown.is_terminal and not shown.is_dumb_terminal:
                _stay(reader, shown, interval)
            else:
                _go_on(reader, shown, interval)
    return 0


def _look(reader: Reader) -> tuple[Watched, Sequence[HistoryWindow]]:
    run = reader.read()
    return look(run, str(reader.path), time.time()), run.windows


def _stay(reader: Reader, shown: Console, interval: float) -> None:
    """A view that changes in its place."""
    with Live(console=shown, auto_refresh=False) as live:
        while True:
            seen, windows = _look(reader)
            live.update(_block(seen, windows, shown), refresh=True)
            if seen.state == "ended":
                return
            time.sleep(interval)


def _go_on(reader: Reader, shown: Console, interval: float) -> None:
    """A block for each change, below the one before."""
    before = None
    while True:
        seen, windows = _look(reader)
        if (news := (seen.updated, seen.state, seen.step, len(seen.reports))) != before:
            if before is not None:
                shown.print()
            shown.print(_block(seen, windows, shown))
            shown.file.flush()
            before = news
        if seen.state == "ended":
            return
        time.sleep(interval)


def _block(seen: Watched, windows: Sequence[HistoryWindow], shown: Console) -> Group:
    found = view.lines(seen, windows, shown.width)
    return Group(*(found if shown.encoding.lower().startswith("utf") else view.plain(found)))
