"""The command ``hvdkit plan``: a table of subcommands, each imported when it is used."""

from __future__ import annotations

import click

from hvdkit.common.commands import group_of

SUBCOMMANDS = {
    "steps": ("hvdkit.measure.plan.steps:steps", "Steps, batches, learning rates and checkpoints."),
    "memory": ("hvdkit.measure.plan.memory:memory", "Memory of a training on each rank, term by term."),
    "scale": ("hvdkit.measure.plan.scale:scale", "Time of a step on more ranks than you have."),
}


@click.group(cls=group_of(SUBCOMMANDS))
def plan() -> None:
    """Show what a training will do, need and take; nothing is started.

    \b
      hvdkit plan steps --samples 60000 --batch-size 64 --lr 0.01 --epochs 12 -n 1,2,4,8
      hvdkit plan memory --parameters 7B --dtype bfloat16 --mixed --capacity-gb 80 -n 8,64
      hvdkit plan scale --fit two.json three.json --at 4,8,512 --step-ms 120

    Each subcommand has its own --help with an example.
    """
