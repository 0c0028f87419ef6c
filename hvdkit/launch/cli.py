"""``hvdkit launch``: start a command on N processes, of this machine or of several hosts."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from dataclasses import replace
from pathlib import Path

import click

from hvdkit.errors import InvalidArgumentError
from hvdkit.launch import attempts, direct, elastic, facts, placement, plan, show
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


def _output_file(_ctx: click.Context, _parameter: click.Parameter, file: Path | None) -> Path | None:
    if file is None:
        return None
    file = file.absolute()
    if not file.parent.is_dir():
        raise click.BadParameter(f"directory {str(file.parent)!r} does not exist; create it first")
    if file.is_dir():
        raise click.BadParameter(f"{str(file)!r} is a directory; give the path of a file in it")
    return file


def _stall_timeout(_ctx: click.Context, _parameter: click.Parameter, seconds: float | None) -> float | None:
    if seconds is not None and not (0 < seconds < math.inf):
        raise click.BadParameter(f"expected a number of seconds above 0, got {seconds}")
    return seconds


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("-n", "n", type=click.IntRange(min=1), required=True, metavar="N", help="Number of processes (ranks).")
@click.option(
    "--launcher",
    type=click.Choice(["auto", *plan.LAUNCHERS]),
    default="auto",
    show_default=True,
    help="auto: that of the batch job (srun, PALS's mpiexec, jsrun, aprun); without one over MPI (mpirun) when Horovod "
    "was built with it, else over Gloo (horovodrun).",
)
@click.option("--ppn", type=click.IntRange(min=1), metavar="P", help="Ranks on each host.")
@click.option("--hosts", metavar="H:S,...", help="Hosts and the ranks that each may take  [default: the batch job's]")
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The same from a file, one HOST:SLOTS or HOST slots=SLOTS a line.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="T",
    help="Compute threads per rank (OMP_NUM_THREADS)  [default: yours, else --depth, else cores / N]",
)
@click.option("--depth", type=click.IntRange(min=1), metavar="D", help="Cores of each rank, to which it is tied.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), metavar="G", help="GPUs to ask srun or jsrun for.")
@click.option("--gpus-per-task", type=click.IntRange(min=1), metavar="G", help="The same for each rank.")
@click.option(
    "--bind",
    type=click.Choice(BINDINGS),
    default="none",
    show_default=True,
    help="Tie each rank to its share of the cores, to a socket or to a NUMA domain (not horovodrun).",
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
    callback=_output_file,
    metavar="FILE",
    help="Write Horovod's timeline to FILE (HOROVOD_TIMELINE).",
)
@click.option(
    "--autotune-log",
    type=click.Path(path_type=Path),
    callback=_output_file,
    metavar="FILE",
    help="Let Horovod tune itself as it trains, and write what it tries to FILE (HOROVOD_AUTOTUNE_LOG).",
)
@click.option(
    "--stall-timeout",
    type=float,
    callback=_stall_timeout,
    metavar="S",
    help="End the job when a collective waits longer than S seconds, with every rank's Python stacks  [default: off, "
    "since a rank may rightly be busy for as long as it likes]",
)
@click.option(
    "--stall-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where those stacks are written  [default: hvdkit-stall-TIME in the current directory]",
)
@click.option(
    "--preflight", "first", is_flag=True, help="Look at every rank first, and start COMMAND only if it can train."
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="K",
    help="Start a job that fails again, at most K times; COMMAND goes on from its own checkpoints "
    "(HVDKIT_RESTART counts)  [default: 0]",
)
@click.option("--min-np", type=click.IntRange(min=1), metavar="N", help="Elastic: wait below so many ranks.")
@click.option("--max-np", type=click.IntRange(min=1), metavar="N", help="Elastic: never more ranks.")
@click.option(
    "--host-discovery-script",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Elastic: a script that prints the hosts that there are now, one HOST:SLOTS a line.",
)
@click.option("--tag/--no-tag", default=True, show_default=True, help="Put [rank] before each line of output.")
@click.option("--dry-run", is_flag=True, help="Print the command line for a shell and start nothing.")
@click.option("--explain", is_flag=True, help="Print every setting and the reason for it, on stderr.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def launch(
    n: int,
    launcher: str,
    ppn: int | None,
    hosts: str | None,
    hostfile: Path | None,
    threads: int | None,
    depth: int | None,
    gpus_per_node: int | None,
    gpus_per_task: int | None,
    bind: str,
    variables: dict[str, str],
    timeline: Path | None,
    autotune_log: Path | None,
    stall_timeout: float | None,
    stall_dir: Path | None,
    first: bool,
    restarts: int,
    min_np: int | None,
    max_np: int | None,
    host_discovery_script: Path | None,
    tag: bool,
    dry_run: bool,
    explain: bool,
    command: tuple[str, ...],
) -> int:
    """Start COMMAND on N processes of this machine or of several hosts, with settings that suit Horovod.

    Options of `hvdkit launch` come before COMMAND; everything after it is passed on untouched. A COMMAND that is a
    .py file is run by the Python that hvdkit is installed in. The ranks read nothing from standard input.

    Each line of output is tagged with the rank it comes from. When a rank fails, Ctrl-C is pressed or this program
    is told to end, every process is ended. The exit status is that of the rank that failed first: its own, or
    128 + N when signal N killed it (137: SIGKILL, often for want of memory); 130 after Ctrl-C; 75 when a collective
    waited longer than --stall-timeout. The traceback of that rank is printed last; ranks that only lost it take one
    line each.

    \b
    Examples:
      hvdkit launch -n 2 train.py --epochs 3
      hvdkit launch -n 4 --threads 2 --timeline trace.json -- python -m mypackage.train
      hvdkit launch -n 2 --dry-run --explain python train.py
      hvdkit launch -n 4 --preflight --restarts 3 -- python train.py --resume
      hvdkit launch -n 8 --hosts h1:4,h2:4 -- python train.py
      hvdkit launch -n 8 --ppn 4 --depth 16 -- python train.py      (in a batch job)
      hvdkit launch -n 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh -- python train.py
    """
    if stall_dir is not None and stall_timeout is None:
        raise InvalidArgumentError("--stall-dir needs --stall-timeout, which says when stacks are written there.")
    stall_dir = (stall_dir or Path(time.strftime("hvdkit-stall-%Y%m%d-%H%M%S"))).absolute()
    placed = _place(n, ppn, hosts, hostfile)
    request = Request(
        n, command, launcher, threads, bind, variables, timeline, stall_timeout, stall_dir,
        ppn=ppn or placed.ppn, depth=depth, hosts=placed.hosts, hosts_chosen=placed.chosen, gpus_per_node=gpus_per_node,
        gpus_per_task=gpus_per_task, autotune_log=autotune_log, dry_run=dry_run,
    )  # fmt: skip
    wanted = elastic.check(n, min_np, max_np, host_discovery_script)
    if wanted is not None:
        _check_elastic(request, alone=not (first or restarts or placed.chosen))
    job = _plan(request) if wanted is None else _elastic_plan(request, wanted)
    for note in job.notes:
        click.echo(f"hvdkit launch: {note}", err=True)
    if explain:
        click.echo(show.explanation(job), err=True)
    if dry_run:
        click.echo(show.command_line(job))
        return 0
    if wanted is not None:
        return direct.run([*job.launcher, *job.command], job.environment).status
    if first and job.direct:
        raise InvalidArgumentError(
            f"--preflight works on one machine, and {job.launcher_name} starts ranks on other hosts; start 'hvdkit "
            "preflight' itself in place of the command."
        )
    if first and not attempts.preflight(job, facts.own_python()):
        click.echo(f"hvdkit launch: {command[0]} was not started, since it could not train.", err=True)
        return 1
    return attempts.run(lambda attempt: _attempt(request, job, attempt), restarts, tagged=tag)


def _place(n: int, ppn: int | None, hosts: str | None, hostfile: Path | None) -> placement.Placement:
    """Where the ranks are to run."""
    if hosts is not None and hostfile is not None:
        raise InvalidArgumentError("--hosts and --hostfile say the same; give one of them.")
    given = None
    if hosts is not None:
        given = placement.parse(hosts)
    elif hostfile is not None:
        given = placement.read(hostfile)
    return placement.place(n, ppn, given, os.environ, socket.gethostname())


def _check_elastic(request: Request, *, alone: bool) -> None:
    if not alone or request.stall_timeout is not None or request.launcher not in ("auto", "horovodrun"):
        raise InvalidArgumentError(
            "an elastic job is horovodrun's alone: leave --preflight, --restarts, --stall-timeout, --hosts, --hostfile "
            "and other launchers out."
        )


def _attempt(request: Request, job: Plan, attempt: int) -> Plan:
    """The plan with the number of the attempt, which ranks on other hosts are told by the command line."""
    number = {"HVDKIT_RESTART": str(attempt)}
    if job.direct:
        return _plan(replace(request, variables={**request.variables, **number}))
    return replace(job, environment={**job.environment, **number})


def _elastic_plan(request: Request, wanted: elastic.Elastic) -> Plan:
    """The plan of a job that horovodrun runs by itself."""
    job = _plan(replace(request, launcher="horovodrun", hosts=()))
    found = elastic.hosts(wanted.script, job.environment)
    settings = elastic.settings(request.n, wanted, found)
    return replace(
        job,
        launcher=(job.launcher[0], *(word for setting in settings for word in setting.words)),
        settings=(*settings, *(setting for setting in job.settings if setting.variables)),
        notes=(*job.notes, *elastic.notes(request.n, wanted, found)),
    )


def _plan(request: Request) -> Plan:
    environ = dict(os.environ)
    python = facts.own_python()
    path = request.variables.get("PATH", facts.job_path(environ, python))
    command = resolve(request.command, path, python)
    return plan.build(request, facts.gather(request, environ), command, environ)
