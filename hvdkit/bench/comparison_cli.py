"""``hvdkit bench compare``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hvdkit.bench import comparison, results
from hvdkit.bench.analysis import ranks_text
from hvdkit.bench.comparison import Compared
from hvdkit.bench.tables import interval, readable


def _limit(_ctx: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"expected a ratio above 0, such as 0.95, got {value}")
    return value


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("before", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="A.json")
@click.argument("after", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="B.json")
@click.option(
    "--fail-below",
    "limit",
    type=float,
    callback=_limit,
    metavar="RATIO",
    help="Exit with 1 when B's speed compared with A's is below this at some number of ranks, with its whole 95 % "
    "interval.",
)
@click.option("--json", "want_json", is_flag=True, help="Print JSON.")
def compare(before: Path, after: Path, limit: float | None, want_json: bool) -> int:
    """Compare two results of `hvdkit bench scaling`, number of ranks by number of ranks.

    The speed of B compared with A is above 1 where B is faster. What is different beside the measurements (commit,
    versions, cores) is said.

    \b
    Example, for a continuous integration:
      hvdkit bench compare main.json branch.json --fail-below 0.95
    """
    first, second = results.read(before), results.read(after)
    compared = comparison.compare(first, second)
    slower = [] if limit is None else comparison.below(compared, limit)
    notes = comparison.differences(first, second)
    if want_json:
        click.echo(json.dumps(comparison.as_json(compared, limit, notes), indent=2))
    else:
        _print(compared, limit, slower, notes)
    return 1 if slower else 0


def _print(compared: Sequence[Compared], limit: float | None, slower: Sequence[Compared], notes: Sequence[str]) -> None:
    console = Console(highlight=False, markup=False)
    table = Table()
    for name in ("ranks", "A, seconds", "B, seconds", "speed of B / A"):
        table.add_column(name, justify="right")
    for one in compared:
        table.add_row(str(one.ranks), interval(one.before), interval(one.after), interval(one.speed))
    console.print(table)
    for note in notes:
        console.print(f"- {readable(note)}", soft_wrap=True)
    if limit is None:
        return
    for one in compared:
        if one in slower:
            verdict = f"below {limit:g}, failed"
        elif one.speed.value < limit:
            verdict = f"below {limit:g}, but its interval reaches above: not sure enough to fail"
        else:
            continue
        console.print(f"On {ranks_text(one.ranks)}: speed {interval(one.speed)} is {verdict}.", soft_wrap=True)
    if not slower:
        console.print(f"No speed is below {limit:g} beyond noise.")
