"""The command ``hvdkit doctor``."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import click
from rich.console import Console

from hvdkit.common import masked
from hvdkit.common.commands import JSON, time_limit
from hvdkit.errors import InvalidArgumentError
from hvdkit.prepare.doctor import job as ranks
from hvdkit.prepare.doctor.checks import CHECKS
from hvdkit.prepare.doctor.finding import WIDEST, examine, has_errors
from hvdkit.prepare.doctor.probe import DEFAULT_SECONDS, gather
from hvdkit.prepare.doctor.report import page, report_of


@click.command()
@JSON
@click.option(
    "--report",
    is_flag=True,
    help="Print the text to be pasted: without colours, host and user names, tokens and keys.",
)
@click.option("--job", is_flag=True, help="Inside a job, on every rank: can its ranks train together?")
@click.option("--report-to", type=click.Path(file_okay=False, exists=True, path_type=Path), hidden=True)
@time_limit(
    DEFAULT_SECONDS,
    "Time limit of each import, and with --job for all ranks to join; raise it on a slow network file system.",
)
def doctor(json_: bool, report: bool, job: bool, report_to: Path | None, timeout: float) -> int:
    """Report what is installed, what does not fit together and how to fix it.

    Looks at the environment that `hvdkit` itself runs in. It imports each framework, Horovod and mpi4py in a process of
    its own: a crash or a hang there becomes a finding. Then `hvdkit launch` trains on 2 ranks in each framework that
    Horovod loads in. "Training works here" means that this was done. Takes about half a minute; changes nothing.

    \b
    It compares
      the frameworks with those that Horovod was built for (drift),
      the MPI of Horovod with those of mpi4py and of mpirun (every process is rank 0),
      the accelerators and cores that there are with those that training would use,
      OMP_NUM_THREADS with the cores that there are.

    With --job it looks at a job from inside. Start it as the training will be started, on every rank; or let `hvdkit
    launch --preflight` do that. Every rank takes the first two steps (init, pin_device) and reports its rank by the
    launcher and by Horovod, its host, GPU, cores, threads and versions. Rank 0 prints them.

    Each finding says what, why and fix. An error means that training does not work. A warning means that it works
    badly, or not in every case.

    \b
    Examples:
      hvdkit doctor
      hvdkit doctor --report
      hvdkit doctor --json > doctor.json
      srun hvdkit doctor --job
      mpirun -n 4 hvdkit doctor --job --json > job.json

    The JSON object has "ok", "hvdkit", "findings" (check, level, what, why, fix), and "components" (name to status,
    version, detail) with "facts" (everything that was found), or "ranks" with --job.

    Exit status: 0 without errors, 1 with an error, 2 for bad usage.
    """
    if job or report_to:
        if report:
            raise InvalidArgumentError("--report is about one machine; leave it or --job out.")
        return ranks.examine_job(timeout, as_json=json_, report_to=report_to)
    if json_ and report:
        raise InvalidArgumentError("--json and --report are two forms of one report; give one of them.")
    facts = gather(seconds=timeout)
    findings = examine(CHECKS, facts)
    if report:
        text = io.StringIO()
        page(facts, findings, WIDEST).show(Console(file=text, width=2 * WIDEST, color_system=None, highlight=False))
        click.echo(masked.without_names(text.getvalue()), nl=False)
    else:
        width = shutil.get_terminal_size().columns
        page(facts, findings, width).print("json" if json_ else None, report_of(facts, findings))
    return 1 if has_errors(findings) else 0
