"""``hvdkit launch``: start a command on N processes of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from hvdkit.launch import facts, plan, show, supervise
from hvdkit.launch.command import resolve
from hvdkit.launch.model import BINDINGS, Plan, Request

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def _variables(_ctx: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    variables = {}
    for pair in pairs:
        match = _VARIABLE.fullmatch(pair)
        if match is None:
            raise click.BadParameter(f"expected NAME=VALUE, got {pair!r}")
        variables[match[1]] = match[2]
    return variables


def _timeline(_ctx: click.Context, _parameter: click.Parameter, file: Path | None) -> Path | None:
    if file is None:
        return None
    file = file.absolute()
    if not file.parent.is_dir():
        raise click.BadParameter(f"directory {str(file.parent)!r} does not exist; create it first")
    if file.is_dir():
        raise click.BadParameter(f"{str(file)!r} is a directory; give the path of a file in it")
    return file


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("-n", "n", type=click.IntRange(min=1), required=True, metavar="N", help="Number of processes (ranks).")
@click.option(
    "--launcher",
    type=click.Choice(["auto", *plan.LAUNCHERS]),
    default="auto",
    show_default=True,
    help="auto: over MPI (mpirun) when Horovod was built with it, else over Gloo (horovodrun).",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="T",
    help="Compute threads per rank (OMP_NUM_THREADS)  [default: yours, else cores / N]",
)
@click.option(
    "--bind",
    type=click.Choice(BINDINGS),
    default="none",
    show_default=True,
    help="Tie each rank to its share of the cores, to a socket or to a NUMA domain (mpirun only).",
)
@click.option(
    "--env",
    "variables",
    multiple=True,
    callback=_variables,
    metavar="NAME=VALUE",
    help="Set an environment variable in every rank; repeatable.",
)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    callback=_timeline,
    metavar="FILE",
    help="Write Horovod's timeline to FILE (HOROVOD_TIMELINE).",
)
@click.option("--tag/--no-tag", default=True, show_default=True, help="Put [rank] before each line of output.")
@click.option("--dry-run", is_flag=True, help="Print the command line for a shell and start nothing.")
@click.option("--explain", is_flag=True, help="Print every setting and the reason for it, on stderr.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def launch(
    n: int,
    launcher: str,
    threads: int | None,
    bind: str,
    variables: dict[str, str],
    timeline: Path | None,
    tag: bool,
    dry_run: bool,
    explain: bool,
    command: tuple[str, ...],
) -> int:
    """Start COMMAND on N processes of this machine, with settings that suit Horovod.

    Options of `hvdkit launch` come before COMMAND; everything after it is passed on untouched. A COMMAND that is a
    .py file is run by the Python that hvdkit is installed in. The ranks read nothing from standard input.

    Each line of output is tagged with the rank it comes from. When a rank fails, Ctrl-C is pressed or this program
    is told to end, every process is ended. The exit status is that of the rank that failed first: its own, or
    128 + N when signal N killed it (137: SIGKILL, often for want of memory); 130 after Ctrl-C.

    \b
    Examples:
      hvdkit launch -n 2 train.py --epochs 3
      hvdkit launch -n 4 --threads 2 --timeline trace.json -- python -m mypackage.train
      hvdkit launch -n 2 --dry-run --explain python train.py
    """
    request = Request(n, command, launcher, threads, bind, variables, timeline)
    job = _plan(request)
    for note in job.notes:
        click.echo(f"hvdkit launch: {note}", err=True)
    if explain:
        click.echo(show.explanation(job), err=True)
    if dry_run:
        click.echo(show.command_line(job))
        return 0
    return supervise.run(job, tagged=tag)


def _plan(request: Request) -> Plan:
    environ = dict(os.environ)
    python = facts.own_python()
    path = request.variables.get("PATH", facts.job_path(environ, python))
    command = resolve(request.command, path, python)
    return plan.build(request, facts.gather(request, environ), command, environ)
