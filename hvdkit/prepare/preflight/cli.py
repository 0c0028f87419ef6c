"""The command ``hvdkit preflight``."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import click

from hvdkit.common.commands import JSON, time_limit
from hvdkit.prepare.doctor.finding import has_errors
from hvdkit.prepare.preflight import exchange, findings, show
from hvdkit.prepare.preflight.report import look


@click.command()
@JSON
@time_limit(60.0, "Time limit for all ranks to join.")
@click.option("--report", type=click.Path(file_okay=False, exists=True, path_type=Path), hidden=True)
def preflight(json_: bool, timeout: float, report: Path | None) -> int:
    """Inside a job: do all ranks see each other, the same versions, and devices of their own?

    Start it as the training will be started, on every rank; or let `hvdkit launch --preflight` do that. Every rank
    reports its rank by the launcher, by Horovod and by MPI, its host, GPU, cores, threads, versions, free disk and
    clock. Rank 0 prints them and the findings, each with what, why and fix.

    \b
    It finds
      MPI that leaves every process alone (rank 0 of 1), ranks that Horovod numbers differently,
      two ranks on one GPU, ranks without one, more ranks or threads than cores,
      packages that a host lacks or has in another version, full disks, clocks that are apart.

    \b
    Examples:
      srun hvdkit preflight
      mpirun -n 4 hvdkit preflight --json > preflight.json
      hvdkit launch --preflight -n 4 -- python train.py

    The JSON object has "ok", "hvdkit", "findings" (check, level, what, why, fix) and "ranks".

    Exit status: 0 without errors, 1 with an error, 2 for bad usage.
    """
    own = look(os.environ)
    if report is not None:
        exchange.write(report, own)
    watch = threading.Timer(timeout, _give_up, (own.rank, own.size, timeout))
    watch.daemon = True
    watch.start()
    reports = exchange.meet(own)
    watch.cancel()
    if report is not None:
        exchange.write(report, next(one for one in reports if one.rank == own.rank))
        return 0
    found = findings.examine(reports)
    if own.rank == 0 and json_:
        click.echo(show.as_json(reports, found), nl=False)
    elif own.rank == 0:
        show.page(reports, found).print()
    return 1 if has_errors(found) else 0


def _give_up(rank: int, size: int, timeout: float) -> None:
    sys.stderr.write(
        f"hvdkit preflight: rank {rank} of {size} has not met the others after {timeout:g} s; look for errors of other "
        "ranks above, check that every host has this environment and that they reach each other.\n"
    )
    sys.stderr.flush()
    os._exit(1)
