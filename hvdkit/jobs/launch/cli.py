"""``hvdkit launch``: start a command on N processes, of this machine or of several hosts."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hvdkit.common.commands import with_options
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch import facts, plan, recordings, stage, supervise
from hvdkit.jobs.launch.model import LaunchPlan
from hvdkit.jobs.launch.options import OPTIONS, Request
from hvdkit.jobs.launch.output import Write
from hvdkit.jobs.launch.peer import JobEnd
from hvdkit.prepare.doctor import job as ranks
from hvdkit.prepare.doctor.host import WRITING

_PAUSE_S = 1.0
"""Seconds before a restart: what failed for want of a port or of memory has it back."""


@click.command(context_settings={"allow_interspersed_args": False})
@with_options(tuple(OPTIONS.values()))
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def launch(*, command: tuple[str, ...], **typed: Any) -> int:
    """Start COMMAND on N processes of this machine or of several hosts, with settings that suit Horovod.

    Options of `hvdkit launch` come before COMMAND; everything after it is passed on unchanged. A COMMAND that is a
    .py file is run by the Python that hvdkit is installed in. The ranks read nothing from standard input.

    Each line of output is tagged with the rank it comes from. When a rank fails, Ctrl-C is pressed or this program is
    told to end, every process is ended. SIGUSR1 and SIGUSR2 are passed on to the ranks that handle them. The traceback
    of the rank that failed first is printed last; ranks that only lost contact with it take one line each.

    The exit status is that of the rank that failed first: its own, or 128 + N when signal N killed it (137: SIGKILL;
    the last line says where memory ran out). It is 130 after Ctrl-C, and 75 when a collective waited longer than
    --stall-timeout.

    \b
    Examples:
      hvdkit launch -n 2 train.py --epochs 3
      hvdkit launch -n 4 --threads 2 --timeline trace.json -- python -m mypackage.train
      hvdkit launch -n 2 --dry-run --explain python train.py
      hvdkit launch -n 4 --preflight --restarts 3 -- python train.py --resume
      hvdkit launch -n 4 --tuned tuned.json -- python train.py
      hvdkit launch -n 4 --mpi-profile profile -- python train.py
      hvdkit launch -n 4 --torch-profile profile -- python train.py
      hvdkit launch -n 4 --explain-job -- python train.py
      hvdkit launch -n 8 --hosts h1:4,h2:4 -- python train.py
      hvdkit launch -n 8 --ppn 4 --depth 16 -- python train.py      (in a batch job)
      hvdkit launch -n 4096 --ppn 4 --stage -- python train.py
      hvdkit launch -n 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh -- python train.py
    """
    return start(facts.settle(command, os.environ, **typed)).status


def start(request: Request, write: Write | None = None) -> JobEnd:
    """Run what is asked for to its end, with all that comes before and after it.

    Args:
        write: see ``supervise.run``.
    """
    job = _plan(request)
    for note in job.notes:
        click.echo(f"hvdkit launch: {note}", err=True)
    if request.explain:
        click.echo(plan.explanation(job), err=True)
    staging = None  # the short job that stages the environment
    if request.stage is not None:
        staging = _plan(stage.request(job, request, request.stage, mpi4py=facts.has_mpi4py()))
    if request.dry_run:
        for shown in filter(None, (staging, job)):
            click.echo(plan.command_line(shown))
        return JobEnd(0, interrupted=False)
    status, why = 0, "it could not train"
    if request.preflight and not _could_train(job):
        status = 1
    elif staging is not None:
        status, why = supervise.run(staging, tagged=False).status, "the environment was not staged"
    if status:
        click.echo(f"hvdkit launch: {request.command[0]} was not started, since {why}.", err=True)
        return JobEnd(status, interrupted=False)
    with recordings.recorded(request, job):
        return _run(request, job, write)


def _could_train(job: LaunchPlan) -> bool:
    """Look at every rank of a job like this one, and print what is found; whether it can train."""
    if job.elsewhere:
        raise InvalidArgumentError(
            f"--preflight works on one machine, and {job.launcher_name} starts ranks on other hosts; start 'hvdkit "
            "doctor --job' itself in place of the command."
        )
    with tempfile.TemporaryDirectory(prefix="hvdkit-preflight-") as directory:
        command = (str(facts.own_python()), *ranks.arguments(directory))
        environment = {name: value for name, value in job.environment.items() if name not in WRITING}
        supervise.run(replace(job, command=command, environment=environment, stall_timeout=None))
        return ranks.could_train(Path(directory))


def _run(request: Request, job: LaunchPlan, write: Write | None) -> JobEnd:
    """Run a job, and again from the start while it fails, at most ``--restarts`` times more; the last end."""
    attempt = 0
    while True:
        if not job.elastic:
            number = {"HVDKIT_RESTART": str(attempt)}
            if job.elsewhere:  # ranks on other hosts are told by the command line
                job = _plan(replace(request, variables={**request.variables, **number}))
            else:
                job = replace(job, environment={**job.environment, **number})
        ended = supervise.run(job, tagged=request.tag, verbose=request.verbose, write=write)
        if ended.status == 0 or ended.interrupted or attempt == request.restarts:
            return ended
        attempt += 1
        click.echo(f"hvdkit launch: restart {attempt} of {request.restarts} after status {ended.status}.", err=True)
        time.sleep(_PAUSE_S)


def _plan(request: Request) -> LaunchPlan:
    return facts.planned(request, dict(os.environ))[1]
