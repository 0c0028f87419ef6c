"""``hvdkit job``: write a batch script that starts a command on several hosts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from hvdkit.common.commands import PATH, with_options
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.job import kubernetes, script, site
from hvdkit.jobs.job import submit as submitting
from hvdkit.jobs.job.script import SYSTEMS
from hvdkit.jobs.job.site import BatchJob


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--system",
    type=click.Choice([*SYSTEMS, kubernetes.NAME]),
    help="The batch system, or kubernetes for an MPIJob  [default: that of --site]",
)
@click.option(
    "--site",
    "site_name",
    metavar="NAME|FILE",
    help=f"Your site: {', '.join(site.known())}, or a TOML file of your own  [default: the system's]",
)
@with_options(tuple(site.OPTIONS.values()))
@click.option("--image", help="Kubernetes: the container image.")
@click.option(
    "--volume", "volumes", multiple=True, metavar="CLAIM:DIR", help="Kubernetes: a volume for every pod; repeatable."
)
@click.option(
    "--ssh-dir",
    default="/home/mpiuser/.ssh",
    metavar="DIR",
    help=f"Kubernetes: where the image's user has ssh keys; {kubernetes.ROOT} for root.",
)
@click.option("-o", "output", type=PATH, metavar="FILE", help="Write the script to FILE, not to standard output.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@click.option("--submit", "submit_it", is_flag=True, help="Submit the job, show its output, and exit with its status.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def job(
    *,
    system: str | None,
    site_name: str | None,
    image: str | None,
    volumes: tuple[str, ...],
    ssh_dir: str,
    output: Path | None,
    force: bool,
    submit_it: bool,
    **wanted: Any,
) -> int:
    """Write a batch script that runs COMMAND on N hosts with P ranks each, through `hvdkit launch`.

    For Kubernetes it is an MPIJob of N worker pods, for the Kubeflow MPI Operator. Nothing is submitted without
    --submit. Requests that no queue or host of the site can meet are refused. COMMAND is quoted: the script's shell
    passes it on as typed.

    \b
    Examples:
      hvdkit job --system slurm --nodes 2 --ppn 4 --walltime 00:30:00 -o job.sh -- python train.py
      hvdkit job --site polaris --nodes 2 --ppn 4 --walltime 00:30:00 --account me -- python train.py --epochs 3
      hvdkit job --site frontier --nodes 100 --ppn 8 --walltime 06:00:00 --account me -- python train.py
      hvdkit job --site ./mine.toml --nodes 1 --ppn 8 --walltime 12:00:00 --queue long -- python train.py
      hvdkit job --system kubernetes --image me/train:1 --nodes 2 --ppn 4 --walltime 2:00:00 -- python train.py

    With --submit, Ctrl-C stops following the job and does not end it. An array is submitted, not followed.

    Exit status: 0 success, 2 for bad usage, an output that cannot be written included; with --submit the job's own.
    """
    asked = BatchJob(**wanted)
    if system == kubernetes.NAME:
        if submit_it:
            raise InvalidArgumentError("--submit is for batch systems; write with -o, then 'kubectl create -f' it.")
        if site_name is not None:
            raise InvalidArgumentError("--site is for batch systems; leave it out with --system kubernetes.")
        text, submit = kubernetes.write(asked, image, volumes, ssh_dir), kubernetes.SUBMIT
    else:
        if image is not None or volumes:
            raise InvalidArgumentError("--image and --volume are for --system kubernetes; leave them out.")
        chosen = site.find(system, site_name)
        text = script.write(asked, chosen, str(Path(sys.executable).absolute().parent))
        for note in site.notes(asked, chosen):
            click.echo(f"Note: {note}", err=True)
        submit = SYSTEMS[chosen.system].submit
    if output is not None:
        _save(output, text, force=force)
        click.echo(f"{output} is written; submit it: {submit} {shlex.quote(str(output))}", err=True)
    elif not submit_it:
        click.echo(text, nl=False)
    return submitting.submit(chosen.system, asked, text) if submit_it else 0


def _save(file: Path, text: str, *, force: bool) -> None:
    try:
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
        file.chmod(0o755)  # Cobalt runs the file itself
    except FileExistsError as error:
        raise InvalidArgumentError(f"{file} exists; give another name, or --force to overwrite it.") from error
    except OSError as error:
        raise InvalidArgumentError(f"{file} cannot be written: {error.strerror}.") from error
