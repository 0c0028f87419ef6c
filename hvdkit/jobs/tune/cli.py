"""``hvdkit tune``: find the settings that make a job fast here, by running it."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from hvdkit.common import json_files
from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1, PATH, output_file, seconds_above_0, with_options
from hvdkit.errors import HvdkitError, require_scipy
from hvdkit.jobs import trials
from hvdkit.jobs.launch import options
from hvdkit.jobs.launch.tuned import MIB
from hvdkit.jobs.trials import (
    CYCLE_TIMES_MS,
    FUSION_THRESHOLDS_BYTES,
    Launch,
    Space,
    ToldToEnd,
    ended_by_signals,
    label,
)
from hvdkit.jobs.tune import report
from hvdkit.jobs.tune.search import Effort, Search


def _list(kind: Callable[[str], float], least: float, unit: str) -> Callable[..., tuple[float, ...] | None]:
    """Reads ``a,b,c``; an empty text is no value at all."""

    def read(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[float, ...] | None:
        if text is None:
            return None
        try:
            values = tuple(kind(word) for word in text.split(",") if word.strip())
        except ValueError:
            values = (-1.0,)
        if not all(least <= value < math.inf for value in values):
            raise click.BadParameter(f"expected {unit}, {least:g} or more, with commas between them, got {text!r}")
        return values

    return read


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "n", type=AT_LEAST_1, required=True, metavar="N", help="Number of processes (ranks).")
@click.option(
    "-o",
    "output",
    type=PATH,
    callback=output_file,
    metavar="FILE",
    help="Write the result here, for `hvdkit launch --tuned FILE`.",
)
@click.option(
    "--launcher",
    type=click.Choice(["auto", *options.LAUNCHERS]),
    default="auto",
    help="Launcher of every job. auto: that of `hvdkit launch`, and as a candidate the other one of mpirun and "
    "horovodrun.",
)
@click.option(
    "--threads",
    callback=_list(int, 1, "whole numbers"),
    metavar="T,...",
    help="Threads per rank to try; '' for none  [default: the cores of a rank, one less, half]",
)
@click.option(
    "--cycle-times-ms",
    callback=_list(float, 0, "milliseconds"),
    metavar="MS,...",
    default=",".join(f"{ms:g}" for ms in CYCLE_TIMES_MS),
    help="Cycle times to try; '' for none",
)
@click.option(
    "--fusion-thresholds-mb",
    callback=_list(float, 0, "MiB"),
    metavar="MB,...",
    default=",".join(f"{size / MIB:g}" for size in FUSION_THRESHOLDS_BYTES),
    help="Fusion thresholds to try, in MiB; '' for none",
)
@click.option(
    "--candidates",
    "limit",
    type=AT_LEAST_1,
    default=8,
    metavar="K",
    help="Settings to try: each change alone first, then combinations drawn at random.",
)
@click.option(
    "--repeats",
    type=AT_LEAST_1,
    default=4,
    metavar="R",
    help="Runs of each setting that select the two best.",
)
@click.option(
    "--confirmations",
    type=click.IntRange(min=3),
    default=8,
    metavar="R",
    help="Final runs of the two best settings and of the default; only these decide.",
)
@click.option(
    "--budget",
    type=float,
    callback=seconds_above_0,
    metavar="S",
    help="Time limit in seconds; no job starts that would end after it.",
)
@click.option("--seed", type=AT_LEAST_0, default=0, help="Random seed of the order of the jobs.")
@with_options([options.OPTIONS[name] for name in ("ppn", "depth", "hosts", "hostfile", "variables")])
@click.option("--json", "want_json", is_flag=True, help="Print the outcome as JSON.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def tune(
    *,
    n: int,
    command: tuple[str, ...],
    output: Path | None,
    threads: tuple[int, ...] | None,
    cycle_times_ms: tuple[float, ...],
    fusion_thresholds_mb: tuple[float, ...],
    limit: int,
    repeats: int,
    confirmations: int,
    budget: float | None,
    seed: int,
    want_json: bool,
    **where: Any,
) -> int:
    """Find the launcher, cycle time, fusion threshold and threads that make COMMAND fast on N ranks, by running it.

    COMMAND is run many times, whole, with `hvdkit launch`: keep it short (seconds), but with the model and the batch
    size that matter. The seconds of its closing line `Hvd Procs N Total time: X second` are compared, else the wall
    time of whole jobs. A setting is adopted only when fresh runs show it to be faster than the default, by a 95 %
    confidence interval that lies above 1. Progress is on standard error.

    Exit status: 0, also when nothing is better than the default; 1 when the job fails with the default settings; 130
    after Ctrl-C. Ctrl-C prints the best setting so far and writes no file.

    \b
    Examples:
      hvdkit tune -n 2 -o tuned.json -- python examples/pytorch/cnn.py --epochs 2
      hvdkit launch -n 2 --tuned tuned.json -- python examples/pytorch/cnn.py
      hvdkit tune -n 4 --launcher mpirun --threads 1,2,4 --fusion-thresholds-mb '' --budget 600 -- python train.py
    """
    require_scipy("hvdkit tune computes confidence intervals")
    found = trials.look(n, command, where)
    rng = np.random.default_rng(seed)
    fusion = tuple(round(size * MIB) for size in fusion_thresholds_mb)
    space = Space(found.launchers(), found.threads() if threads is None else threads, cycle_times_ms, fusion)
    candidates = space.candidates(limit, rng)
    if not candidates:
        raise click.UsageError("There is nothing to try beside the default; name at least one value.")
    effort = Effort(repeats, confirmations, budget_s=budget)
    search = Search(candidates, Launch(n, command, found.options), effort, rng, say=_say)
    subject = report.TunedJob(n, command, found.describe(), found.facts.cores, seed, found.notes())
    status = _run(search, subject)
    if want_json:
        click.echo(json_files.encode(report.outcome(search, subject, interrupted=status != 0)), nl=False)
    else:
        click.echo(report.text(search, subject, interrupted=status != 0))
    if output is not None and status == 0:
        _save(output, search, subject, where["launcher"] if where["launcher"] in trials.WITH_A_CONTROLLER else None)
    return status


def _say(sentence: str) -> None:
    click.echo(f"hvdkit tune: {sentence}", err=True)


def _run(search: Search, subject: report.TunedJob) -> int:
    """Run the search; 0, or 128 and the number of the signal that ended it."""
    _say(f"trying {len(search.candidates)} settings: {'; '.join(map(label, search.candidates))}")
    for note in subject.notes:
        _say(note)
    with ended_by_signals():
        try:
            search.go()
        except ToldToEnd as ended:
            return 128 + ended.number
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


def _save(file: Path, search: Search, subject: report.TunedJob, launcher: str | None) -> None:
    try:
        report.save(file, search, subject, launcher)
    except OSError as error:
        raise HvdkitError(f"{file} cannot be written: {error.strerror}; the result is the text above.") from error
    what = "the defaults, by which nothing changes" if search.best() is None else "what was adopted"
    click.echo(f"{file} holds {what}: hvdkit launch -n {subject.ranks} --tuned {file} -- COMMAND", err=True)
