"""``hvdkit bench scaling``."""

from __future__ import annotations

import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hvdkit.common.commands import (
    AT_LEAST_0,
    AT_LEAST_1,
    PATH,
    numbers_of_ranks,
    output_file,
    seconds_above_0,
    with_options,
)
from hvdkit.common.extras import require_scipy
from hvdkit.common.table import readable
from hvdkit.measure.bench import laws, results, show_cli, tables
from hvdkit.measure.bench.analysis import analyse
from hvdkit.measure.bench.results import ScalingResults
from hvdkit.measure.bench.scaling import Jobs, go, record
from hvdkit.measure.bench.subject import ScalingAsked, describe
from hvdkit.run.launch import options
from hvdkit.run.trials import here
from hvdkit.run.trials.jobs import ToldToEnd, ended_by_signals


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "ranks", required=True, callback=numbers_of_ranks, metavar="N,...", help="Numbers of ranks, such as 1,2,4."
)
@click.option(
    "-o",
    "output",
    type=PATH,
    required=True,
    callback=output_file,
    metavar="FILE",
    help="Keep what is measured here, after every job; a second call goes on where the first was interrupted. On "
    "several hosts, in a directory that they share.",
)
@click.option(
    "--strong",
    "mode",
    flag_value=laws.STRONG,
    default=laws.STRONG,
    help="Strong scaling: the same total work at every N (an epoch of the same data).",
)
@click.option("--weak", "mode", flag_value=laws.WEAK, help="Weak scaling: the same work per rank and step at every N.")
@click.option("--repeats", type=AT_LEAST_1, default=5, metavar="R", help="Jobs at each N.")
@click.option(
    "--warmup-steps", type=AT_LEAST_0, default=5, metavar="K", help="Warm-up steps of each job, which are not counted."
)
@click.option(
    "--timeline",
    is_flag=True,
    help="Run one more job, unmeasured, at each N above 1 with Horovod's timeline, and break its communication down.",
)
@click.option(
    "--timeout", type=float, callback=seconds_above_0, metavar="S", help="End a job after S seconds, as failed."
)
@click.option("--seed", type=AT_LEAST_0, default=0, help="Random seed of the order of the jobs.")
@with_options([options.OPTIONS[name] for name in ("launcher", "threads")])
@click.option("--ppn", type=AT_LEAST_1, metavar="P", help="Ranks per host; all N where N is smaller.")
@with_options([options.OPTIONS[name] for name in ("depth", "hosts", "hostfile", "variables")])
@with_options(show_cli.FORMS)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def scaling(
    *,
    ranks: tuple[int, ...],
    output: Path,
    mode: str,
    repeats: int,
    warmup_steps: int,
    timeline: bool,
    timeout: float | None,
    seed: int,
    form: str | None,
    command: tuple[str, ...],
    **where: Any,
) -> int:
    """Run COMMAND several times on each number of ranks, in random order, and report how it scales.

    It measures the slowest rank's steps, without the warm-up, where COMMAND records them with `for x, y in
    hk.record_steps(loader)` (Keras: the callback hk.RecordSteps()). Else it takes the seconds of the closing line `Hvd
    Procs N Total time: X second`. Progress is on standard error.

    Exit status: 0; 1 when at some N no job counts; 130 after Ctrl-C; the same command line then resumes.

    \b
    Examples:
      hvdkit bench scaling -n 1,2,4 -o results.json -- python examples/pytorch/cnn.py --epochs 2
      hvdkit bench scaling -n 1,2,4 --weak --threads 1 -o weak.json -- python train.py
      hvdkit bench scaling -n 1,2 --weak --timeline -o r.json -- hvdkit bench synthetic --model mlp
    """
    require_scipy(show_cli.NEEDS_SCIPY)
    wish = here.Wish(1, command, **where)
    asked = ScalingAsked(command, tuple(wish.options()), ranks, mode, repeats, warmup_steps, seed)
    subject = describe(asked, [here.look(_at(wish, n)) for n in ranks])
    found = results.resume(output, subject)
    jobs = Jobs(command, lambda n: _at(wish, n).options(), warmup_steps, output.absolute().parent, timeout)
    status = _run(jobs, found, output, timeline)
    analysis = analyse(found)
    results.write(output, found, analysis)
    tables.page(analysis).print(form, analysis)
    if status != 0:
        click.echo("hvdkit bench: interrupted; the same command line goes on from here.", err=True)
        return status
    page = f"hvdkit bench report {shlex.quote(str(output))} -o FILE.html"
    click.echo(f"hvdkit bench: kept in {output}; `{page}` makes a page of it.", err=True)
    return 1 if any(row.seconds is None for row in analysis.rows) else 0


def _at(wish: here.Wish, ranks: int) -> here.Wish:
    """What is passed on to ``hvdkit launch`` on so many ranks; a host cannot have more ranks than there are."""
    return replace(wish, n=ranks, ppn=None if wish.ppn is None else min(wish.ppn, ranks))


def _run(jobs: Jobs, found: ScalingResults, output: Path, timeline: bool) -> int:
    """Run what is missing; 0, or 128 and the number of the signal that ended it."""

    def say(sentence: str) -> None:
        click.echo(f"hvdkit bench: {readable(sentence)}", err=True)

    def keep() -> None:
        results.write(output, found)

    with ended_by_signals():
        try:
            go(jobs, found, keep, say)
            if timeline:
                record(jobs.recorded, found, keep, say)
        except ToldToEnd as ended:
            return 128 + ended.number
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0
