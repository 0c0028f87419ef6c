"""The command ``hvdkit doctor``."""

from __future__ import annotations

import shutil

import click

from hvdkit.common.commands import JSON, time_limit
from hvdkit.errors import InvalidArgumentError
from hvdkit.prepare.doctor import children
from hvdkit.prepare.doctor.checks import examine
from hvdkit.prepare.doctor.finding import has_errors
from hvdkit.prepare.doctor.probe import DEFAULT_SECONDS, gather
from hvdkit.prepare.doctor.report import as_json, as_text

_WIDEST = 110


@click.command()
@JSON
@click.option(
    "--report", is_flag=True, help="Print the text without colours and without host and user names, to be pasted."
)
@time_limit(DEFAULT_SECONDS, "Time limit of each import and trial run; raise it on a slow network file system.")
def doctor(json_: bool, report: bool, timeout: float) -> int:
    """Report what is installed, what does not fit together and how to fix it.

    Looks at the environment that `hvdkit` itself runs in. It imports each framework, Horovod and mpi4py in a process of
    its own: a crash or a hang there becomes a finding. Then Horovod does an allreduce over MPI and over Gloo in each
    framework. "working" means that this was done. Takes about ten seconds; changes nothing.

    \b
    It compares
      the frameworks with those that Horovod was built for (drift),
      the MPI of Horovod with those of mpi4py and of mpirun (every process is rank 0),
      the accelerators and cores that there are with those that training would use,
      HOROVOD_* and OMP_NUM_THREADS with what they can be.

    Each finding says what, why and fix. An error means that training would not work. A warning means that it works
    badly, or not in every case.

    \b
    Examples:
      hvdkit doctor
      hvdkit doctor --report
      hvdkit doctor --json > doctor.json
      hvdkit doctor --json | python -c 'import json, sys; print(json.load(sys.stdin)["components"]["MPI"])'

    The JSON object has "ok", "hvdkit", "components" (name to status, version, detail), "findings" (check, level,
    what, why, fix) and "facts" (everything that was found).

    Exit status: 0 without errors, 1 with an error, 2 for bad usage.
    """
    if json_ and report:
        raise InvalidArgumentError("--json and --report are two forms of one report; give one of them.")
    facts = gather(seconds=timeout)
    findings = examine(facts)
    if json_:
        click.echo(as_json(facts, findings), nl=False)
    elif report:
        click.echo(click.unstyle(children.without_names(as_text(facts, findings, _WIDEST))))
    else:
        click.echo(as_text(facts, findings, min(shutil.get_terminal_size().columns, _WIDEST)))
    return 1 if has_errors(findings) else 0
