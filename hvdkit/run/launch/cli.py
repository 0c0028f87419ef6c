"""``hvdkit launch``: start a command on N processes, of this machine or of several hosts."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from hvdkit.common.commands import with_options
from hvdkit.errors import InvalidArgumentError
from hvdkit.prepare.doctor import job as ranks
from hvdkit.prepare.doctor.two_ranks import WRITING
from hvdkit.run.launch import batch, facts, horovodrun, options, placement, plan, recordings, supervise, tuned
from hvdkit.run.launch.model import Host, LaunchPlan
from hvdkit.run.launch.options import Request
from hvdkit.run.launch.stage import job as staging

_PAUSE_S = 1.0
"""Seconds before a restart: what failed for want of a port or of memory has it back."""


@click.command(context_settings={"allow_interspersed_args": False})
@with_options(tuple(options.OPTIONS.values()))
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def launch(
    *,
    command: tuple[str, ...],
    preflight: bool,
    restarts: int,
    min_np: int | None,
    max_np: int | None,
    host_discovery_script: Path | None,
    tag: bool,
    verbose: bool,
    dry_run: bool,
    explain: bool,
    **wanted: Any,
) -> int:
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
    request = _request(command, dry_run, **wanted)
    growing = horovodrun.elastic(request.n, min_np, max_np, host_discovery_script)
    if growing is not None:
        _check_elastic(request, alone=not (preflight or restarts or request.hosts_chosen or request.stage))
    job = _plan(request) if growing is None else _elastic_plan(request, growing)
    for note in job.notes:
        click.echo(f"hvdkit launch: {note}", err=True)
    if explain:
        click.echo(plan.explanation(job), err=True)
    before = None  # the short job that stages the environment
    if request.stage is not None:
        before = _plan(staging.request(job, request, request.stage, mpi4py=facts.has_mpi4py()))
    if dry_run:
        if before is not None:
            click.echo(plan.command_line(before))
        click.echo(plan.command_line(job))
        return 0
    if growing is not None:
        with recordings.recorded(request, job):
            return supervise.run(job, tagged=tag, verbose=verbose).status
    if status := _prepared(command[0], job, before, first=preflight):
        return status
    with recordings.recorded(request, job):
        return _run(request, job, restarts, tagged=tag, verbose=verbose)


def _prepared(program: str, job: LaunchPlan, staging_job: LaunchPlan | None, *, first: bool) -> int:
    """What has to go well before a job, --preflight and --stage; the status to leave with, or 0."""
    status, why = 0, "it could not train"
    if first and not _could_train(job):
        status = 1
    elif staging_job is not None:
        status, why = supervise.run(staging_job, tagged=False).status, "the environment was not staged"
    if status:
        click.echo(f"hvdkit launch: {program} was not started, since {why}.", err=True)
    return status


def _could_train(job: LaunchPlan) -> bool:
    """Look at every rank of a job like this one, and print what is found; whether it can train."""
    if job.direct:
        raise InvalidArgumentError(
            f"--preflight works on one machine, and {job.launcher_name} starts ranks on other hosts; start 'hvdkit "
            "doctor --job' itself in place of the command."
        )
    with tempfile.TemporaryDirectory(prefix="hvdkit-preflight-") as directory:
        command = (str(facts.own_python()), *ranks.arguments(directory))
        environment = {name: value for name, value in job.environment.items() if name not in WRITING}
        supervise.run(replace(job, command=command, environment=environment, stall_timeout=None))
        return ranks.could_train(Path(directory))


def _run(request: Request, job: LaunchPlan, restarts: int, *, tagged: bool, verbose: bool) -> int:
    """Run a job, and again from the start while it fails, at most ``restarts`` times more; the last exit status."""
    attempt = 0
    while True:
        number = {"HVDKIT_RESTART": str(attempt)}
        if job.direct:  # ranks on other hosts are told by the command line
            job = _plan(replace(request, variables={**request.variables, **number}))
        else:
            job = replace(job, environment={**job.environment, **number})
        ended = supervise.run(job, tagged=tagged, verbose=verbose)
        if ended.status == 0 or ended.interrupted or attempt == restarts:
            return ended.status
        attempt += 1
        click.echo(f"hvdkit launch: restart {attempt} of {restarts} after status {ended.status}.", err=True)
        time.sleep(_PAUSE_S)


def _request(command: tuple[str, ...], dry_run: bool, **asked: Any) -> Request:
    """The options as one request; an error where one needs or excludes another."""
    options.check_needs(asked)
    skew, explains, stages = asked.pop("skew"), asked.pop("explain_job"), asked.pop("stage")
    chosen, source, given = tuned.choose(asked.pop("tuned"), **{name: asked.pop(name) for name in tuned.OVERRIDES})
    fixed = "--tuned" if source else next(iter(given.values()), None)
    if fixed is not None and asked["autotune_log"] is not None:
        raise InvalidArgumentError(f"{fixed} fixes what --autotune-log is to vary; give one of them.")
    if skew and chosen.cache_capacity:
        raise InvalidArgumentError("--skew needs the cache off, got --cache-capacity; leave one of them out.")
    if skew:
        chosen, given = structs.replace(chosen, cache_capacity=0), {**given, "HOROVOD_CACHE_CAPACITY": "--skew"}
    stamp = time.strftime("%Y%m%d-%H%M%S")
    explain_dir = asked.pop("explain_dir") or Path(f"hvdkit-job-{stamp}")
    stall_dir = asked.pop("stall_dir") or Path(f"hvdkit-stall-{stamp}")
    stage_dir, ppn = asked.pop("stage_dir"), asked.pop("ppn")
    named = asked.pop("hosts"), asked.pop("hostfile")
    placed = placement.asked(asked["n"], ppn, *named, os.environ, anywhere=asked["launcher"] in batch.LINES)
    return Request(
        command=command,
        stall_dir=stall_dir.absolute(),
        explain_job=explain_dir.absolute() if explains else None,
        stage=staging.wanted(stage_dir) if stages else None,
        ppn=ppn or placed.ppn,
        hosts=placed.hosts,
        hosts_chosen=placed.chosen,
        tuned=chosen,
        options=given,
        tuned_source=source,
        dry_run=dry_run,
        **asked,
    )


def _check_elastic(request: Request, *, alone: bool) -> None:
    if not alone or request.stall_timeout is not None or request.launcher not in ("auto", "horovodrun"):
        raise InvalidArgumentError(
            "an elastic job is horovodrun's alone: leave --preflight, --restarts, --stall-timeout, --hosts, "
            "--hostfile, --stage and other launchers out."
        )


def _elastic_plan(request: Request, wanted: horovodrun.Elastic) -> LaunchPlan:
    """The plan of a job that horovodrun runs by itself."""
    here = replace(request, launcher="horovodrun", hosts=(), ppn=None, elastic=True)
    job = _plan(here)
    found = horovodrun.discovered(wanted.script, job.environment, request.ppn)
    if horovodrun.are_elsewhere(found):  # they share no cores with this machine
        job = _plan(replace(here, hosts=tuple(Host(name, slots) for name, slots in found.items())))
    settings = horovodrun.elastic_settings(request.n, wanted, found, request.ppn)
    return replace(
        job,
        launcher=(job.launcher[0], *(word for setting in settings for word in setting.words)),
        settings=(*settings, *(setting for setting in job.settings if setting.variables)),
        notes=(*job.notes, *horovodrun.elastic_notes(request.n, wanted, found)),
    )


def _plan(request: Request) -> LaunchPlan:
    return facts.planned(request, dict(os.environ))[1]
