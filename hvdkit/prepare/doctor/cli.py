"""The command ``hvdkit doctor``, and the table of its checks: facts in, findings out, worst first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial

import click

from hvdkit.common import masked
from hvdkit.common.commands import JSON, time_limit
from hvdkit.errors import InvalidArgumentError
from hvdkit.prepare.doctor import check_frameworks, check_horovod, check_host, check_mpi
from hvdkit.prepare.doctor.facts import FRAMEWORKS, DoctorFacts
from hvdkit.prepare.doctor.finding import Found, has_errors, worst_first
from hvdkit.prepare.doctor.probe import DEFAULT_SECONDS, gather
from hvdkit.prepare.doctor.report import as_json, as_text

_WIDEST = 110
Check = Callable[[DoctorFacts], Iterator[Found]]


def _each(check: Callable[..., Iterator[Found]], *more: str) -> list[Check]:
    """A check of each framework, and of these packages."""
    return [partial(check, name=name) for name in (*FRAMEWORKS, *more)]


CHECKS: tuple[Check, ...] = (
    check_frameworks.something_to_train_with,
    *_each(check_frameworks.import_fails, "keras", "jax"),
    *_each(check_frameworks.two_versions, "keras"),
    check_frameworks.keras,
    check_horovod.installed,
    *_each(check_horovod.extension_missing),
    *_each(check_horovod.framework_gone),
    *_each(check_horovod.drift),
    *_each(check_horovod.extension_fails),
    *_each(check_horovod.run_fails),
    check_horovod.launch_fails,
    check_mpi.drift,
    check_horovod.record,
    check_frameworks.horovod_on_keras3,
    check_mpi.mpi4py,
    check_mpi.two_mpis,
    check_mpi.mpirun,
    *_each(check_host.gpus),
    *_each(check_host.no_nccl),
    check_host.cores,
    check_host.machine,
    check_host.fusion_threshold,
    check_host.unbuilt_choices,
    check_host.timeline,
)
"""The checks, in the order in which findings of one level are shown."""


def examine(facts: DoctorFacts) -> list[Found]:
    """What all checks find, errors first."""
    return worst_first(finding for check in CHECKS for finding in check(facts))


@click.command()
@JSON
@click.option(
    "--report",
    is_flag=True,
    help="Print the text to be pasted: without colours, host and user names, tokens and keys.",
)
@time_limit(DEFAULT_SECONDS, "Time limit of each import and trial run; raise it on a slow network file system.")
def doctor(json_: bool, report: bool, timeout: float) -> int:
    """Report what is installed, what does not fit together and how to fix it.

    Looks at the environment that `hvdkit` itself runs in. It imports each framework, Horovod and mpi4py in a process of
    its own: a crash or a hang there becomes a finding. Then Horovod does an allreduce over MPI and over Gloo in each
    framework. "working" means that this was done. At last `hvdkit launch` trains on 2 ranks. Takes about fifteen
    seconds; changes nothing.

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
        click.echo(click.unstyle(masked.without_names(as_text(facts, findings, _WIDEST))))
    else:
        click.echo(as_text(facts, findings, min(shutil.get_terminal_size().columns, _WIDEST)))
    return 1 if has_errors(findings) else 0
