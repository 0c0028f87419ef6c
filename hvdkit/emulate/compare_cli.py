"""``hvdkit emulate compare``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hvdkit.emulate import compare as comparing
from hvdkit.emulate import results
from hvdkit.emulate.compare import SLOWEST, TRANSFER, Compared
from hvdkit.emulate.tables import WIDTH, with_interval
from hvdkit.units import printable


def _limit(_ctx: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"expected a ratio above 0, such as 0.95, got {value}")
    return value


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("before", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="A.json")
@click.argument("after", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="B.json")
@click.option(
    "--by",
    type=click.Choice([SLOWEST, TRANSFER]),
    default=SLOWEST,
    show_default=True,
    help="What is compared: the delay of the slowest rank, or the time from the last rank's arrival on.",
)
@click.option(
    "--fail-below",
    "limit",
    type=float,
    callback=_limit,
    metavar="RATIO",
    help="Exit with 1 when B's speed compared with A's is below this at some size, with its whole 95 % interval.",
)
@click.option("--json", "want_json", is_flag=True, help="Print JSON.")
def compare(before: Path, after: Path, by: str, limit: float | None, want_json: bool) -> int:
    """Compare two results of `hvdkit emulate`, size by size and for whole steps.

    The speed of B compared with A is above 1 where B is faster. What is different beside the measurements (engine,
    ranks, versions) is said.

    \b
    Examples:
      hvdkit emulate compare mpi.json ring.json
      hvdkit emulate compare before.json after.json --fail-below 0.95

    Exit status: 0; 1 when a speed is below --fail-below beyond noise, or a file cannot be used; 2 for bad usage.
    """
    first, second = results.read(before), results.read(after)
    compared = comparing.compare(first, second, by)
    slower = [] if limit is None else comparing.below(compared, limit)
    notes = comparing.differences(first, second)
    if want_json:
        click.echo(json.dumps(comparing.as_json(compared, by, limit, notes), indent=2))
    else:
        _print(compared, limit, slower, notes)
    return 1 if slower else 0


def _print(compared: Sequence[Compared], limit: float | None, slower: Sequence[Compared], notes: Sequence[str]) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    table = Table()
    for name in ("bytes", "A, ms", "B, ms", "speed of B / A"):
        table.add_column(name, justify="right")
    for one in compared:
        ms = [with_interval(estimate.scaled(1000)) for estimate in (one.before, one.after)]
        table.add_row(one.name, *ms, with_interval(one.speed))
    console.print(table)
    for note in notes:
        console.print(f"- {printable(note)}", soft_wrap=True)
    if limit is None:
        return
    for one in compared:
        if one in slower:
            verdict = f"below {limit:g}, failed"
        elif one.speed.value < limit:
            verdict = f"below {limit:g}, but its interval reaches above: not sure enough to fail"
        else:
            continue
        what = "Whole steps" if one.nbytes is None else f"{one.nbytes} bytes"
        console.print(f"{what}: speed {with_interval(one.speed)} is {verdict}.", soft_wrap=True)
    if not slower:
        console.print(f"No speed is below {limit:g} beyond noise.")
