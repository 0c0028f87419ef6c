"""``hvdkit job``: write a batch script that starts a command on several hosts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1, PATH
from hvdkit.errors import InvalidArgumentError
from hvdkit.run.job import script, site
from hvdkit.run.job.model import SYSTEM_NAMES, BatchJob


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--system", type=click.Choice(SYSTEM_NAMES), help="The batch system  [default: that of --site]")
@click.option(
    "--site",
    "site_name",
    metavar="NAME|FILE",
    help=f"Your site: {', '.join(site.known())}, or a TOML file of your own  [default: the system's]",
)
@click.option("--nodes", type=AT_LEAST_1, required=True, metavar="N", help="Number of hosts.")
@click.option("--ppn", type=AT_LEAST_1, metavar="P", help="Ranks on each host  [default: one a GPU, else one a socket]")
@click.option("--walltime", required=True, metavar="HH:MM:SS", help="Time limit of the job.")
@click.option("--queue", metavar="Q", help="Queue or partition  [default: the first of the site's that fits]")
@click.option("--account", metavar="A", help="Account or project to charge.")
@click.option("--depth", type=AT_LEAST_1, metavar="D", help="Cores of each rank  [default: the site's]")
@click.option("--gpus-per-node", type=AT_LEAST_0, metavar="G", help="GPUs on each host, 0 to train on its CPUs.")
@click.option("--stage", is_flag=True, help="Copy the environment to the hosts' local disks first.")
@click.option(
    "--directive",
    "directives",
    multiple=True,
    metavar="TEXT",
    help="A further directive, without its prefix, such as --array=0-9; repeatable.",
)
@click.option("--name", default="hvdkit", help="Name of the job and of its logs.")
@click.option("-o", "output", type=PATH, metavar="FILE", help="Write the script to FILE, not to standard output.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def job(*, system: str | None, site_name: str | None, output: Path | None, force: bool, **wanted: Any) -> int:
    """Write a batch script that runs COMMAND on N hosts with P ranks each, through `hvdkit launch`.

    Nothing is submitted. Requests that no queue or host of the site can meet are refused. COMMAND is quoted: the
    script's shell passes it on as typed.

    \b
    Examples:
      hvdkit job --system slurm --nodes 2 --ppn 4 --walltime 00:30:00 -o job.sh -- python train.py
      hvdkit job --site polaris --nodes 2 --ppn 4 --walltime 00:30:00 --account me -- python train.py --epochs 3
      hvdkit job --site frontier --nodes 100 --ppn 8 --walltime 06:00:00 --account me -- python train.py
      hvdkit job --site ./mine.toml --nodes 1 --ppn 8 --walltime 12:00:00 --queue long -- python train.py

    Exit status: 0 success, 2 for bad usage, an output that cannot be written included.
    """
    asked = BatchJob(**wanted)
    chosen = site.find(system, site_name)
    text = script.write(asked, chosen, str(Path(sys.executable).absolute().parent))
    for note in site.notes(asked, chosen):
        click.echo(f"Note: {note}", err=True)
    if output is None:
        click.echo(text, nl=False)
        return 0
    try:
        with output.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise InvalidArgumentError(f"{output} exists; give another name, or --force to overwrite it.") from error
    except OSError as error:
        raise InvalidArgumentError(f"{output} cannot be written: {error.strerror}.") from error
    submit = script.SYSTEMS[chosen.system].submit
    click.echo(f"{output} is written; submit it: {submit} {shlex.quote(str(output))}", err=True)
    return 0
