"""The command ``hvdkit bench``: a table of subcommands, each imported when it is used."""

from __future__ import annotations

import click

from hvdkit.common.commands import group_of

SUBCOMMANDS = {
    "scaling": (
        "hvdkit.measure.bench.scaling_cli:scaling",
        "Run a training on 1, 2, 4 ranks: how much faster is it?",
    ),
    "show": (
        "hvdkit.measure.bench.show_cli:show",
        "Print the results of `scaling` in another form, or plot them.",
    ),
    "report": ("hvdkit.measure.bench.show_cli:report", "Write the results of `scaling` as one HTML page."),
    "compare": (
        "hvdkit.measure.bench.show_cli:compare",
        "Compare two results: is the second one slower?",
    ),
    "synthetic": (
        "hvdkit.measure.bench.synthetic_cli:synthetic",
        "Train on random data: how many images a second?",
    ),
}


@click.group(cls=group_of(SUBCOMMANDS))
def bench() -> None:
    """Measure how a training scales, with intervals that say how sure the numbers are.

    \b
      hvdkit bench scaling -n 1,2,4 -o results.json -- python train.py
      hvdkit bench compare before.json results.json --fail-below 0.95
      hvdkit bench synthetic --framework torch --model mlp -n 2

    Each subcommand has its own --help with an example.
    """
