"""A job before it is started, and started again: the preflight, and restarts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from hvdkit.common.table import console
from hvdkit.prepare.doctor.finding import has_errors
from hvdkit.prepare.preflight import exchange, findings, show
from hvdkit.run.launch import direct, supervise
from hvdkit.run.launch.model import LaunchPlan
from hvdkit.run.launch.outcome import JobEnd

PAUSE_S = 1.0
"""Seconds before a restart: what failed for want of a port or of memory has it back."""


def preflight(plan: LaunchPlan, python: Path) -> bool:
    """Look at every rank of a job like ``plan``, and print what is found; whether it can train.

    Args:
        plan: the job that is to follow.
        python: the interpreter that has hvdkit.
    """
    with tempfile.TemporaryDirectory(prefix="hvdkit-preflight-") as directory:
        command = (str(python), "-m", "hvdkit.cli", "preflight", "--report", directory)
        environment = {name: value for name, value in plan.environment.items() if name != "HOROVOD_TIMELINE"}
        supervise.run(replace(plan, command=command, environment=environment, stall_timeout=None))
        reports = exchange.read(Path(directory))
    if not reports:
        click.echo("hvdkit launch: no rank left a report; the preflight's errors are above.", err=True)
        return False
    found = findings.examine(reports)
    show.page(reports, found).show(console(stderr=True))
    return not has_errors(found)


def started(job: LaunchPlan, *, tagged: bool = False, verbose: bool = False) -> JobEnd:
    """Run a job once; how it ended."""
    if job.direct:
        return direct.run([*job.launcher, *job.command], job.environment, [host.name for host in job.hosts])
    return supervise.run(job, tagged=tagged, verbose=verbose)


def run(plan_for: Callable[[int], LaunchPlan], restarts: int, *, tagged: bool, verbose: bool) -> int:
    """Run a job, and again from the start while it fails, at most ``restarts`` times more.

    Args:
        plan_for: the plan of an attempt, 0 the first.
    Returns:
        The exit status of the last attempt.
    """
    attempt = 0
    while True:
        ended = started(plan_for(attempt), tagged=tagged, verbose=verbose)
        if ended.status == 0 or ended.interrupted or attempt == restarts:
            return ended.status
        attempt += 1
        click.echo(f"hvdkit launch: restart {attempt} of {restarts} after status {ended.status}.", err=True)
        time.sleep(PAUSE_S)
