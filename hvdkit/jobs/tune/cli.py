"""``hvdkit tune``: find the settings that make a job fast here, by running it, and say what was found."""

from __future__ import annotations

import math
import signal
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from msgspec import structs

from hvdkit.common import json_files
from hvdkit.common.commands import AT_LEAST_1, PATH, output_file, seconds_above_0, with_options
from hvdkit.common.units import share_text
from hvdkit.errors import require_scipy
from hvdkit.jobs import trials
from hvdkit.jobs.launch import options, plan
from hvdkit.jobs.launch.tuned import MIB, Tuned, TunedFile
from hvdkit.jobs.trials import DEFAULT, Here, Launch, ToldToEnd, ended_by_signals
from hvdkit.jobs.tune.search import (
    CONFIDENCE,
    CYCLE_TIMES_MS,
    FUSION_THRESHOLDS_BYTES,
    Search,
    Speedup,
    candidates,
    label,
    thread_choices,
)
from hvdkit.steps.device import threads_asked

_CONTROLLERS = ("mpirun", "horovodrun")
"""Launchers that stand for Horovod's two controllers, MPI and Gloo."""


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
    "--repeats", type=AT_LEAST_1, default=4, metavar="R", help="Runs of each setting that select the two best."
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
@with_options([options.OPTIONS[name] for name in ("launcher", "ppn", "depth", "hosts", "hostfile", "variables")])
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
    **where: Any,
) -> int:
    """Find the launcher, cycle time, fusion threshold and threads that make COMMAND fast on N ranks, by running it.

    COMMAND is run many times, whole, with `hvdkit launch`: keep it short (seconds), but with the model and the batch
    size that matter. The seconds of its closing line `Hvd Procs N Total time: X second` are compared, else the wall
    time of whole jobs. A setting is adopted only when fresh runs show it to be faster than the default, by a 95 %
    confidence interval that lies above 1. With --launcher auto the other one of mpirun and horovodrun is tried, too.
    Progress is on standard error.

    Exit status: 0, also when nothing is better than the default; 1 when the job fails with the default settings; 130
    after Ctrl-C. Ctrl-C prints the best setting so far and writes no file.

    \b
    Examples:
      hvdkit tune -n 2 -o tuned.json -- python examples/pytorch/cnn.py --epochs 2
      hvdkit launch -n 2 --tuned tuned.json -- python examples/pytorch/cnn.py
      hvdkit tune -n 4 --launcher mpirun --threads 1,2,4 --fusion-thresholds-mb '' --budget 600 -- python train.py
    """
    require_scipy("hvdkit tune computes confidence intervals")
    here = trials.look(n, command, where)
    axes = {
        "launcher": _launchers(here),
        "threads": _threads(here) if threads is None else threads,
        "cycle_time_s": [time_ms / 1000 for time_ms in cycle_times_ms],
        "fusion_threshold_bytes": [round(size * MIB) for size in fusion_thresholds_mb],
    }
    rng = np.random.default_rng(0)
    settings = candidates(axes, limit, rng)
    if not settings:
        raise click.UsageError("There is nothing to try beside the default; name at least one value.")
    found = Search(settings, Launch(n, command, here.options), repeats, confirmations, budget, rng, say=_say)
    subject = f"{n} ranks of: {' '.join(command)}\ndefault: {_default(here)}"
    for sentence in (f"trying {len(settings)} settings: {'; '.join(map(label, settings))}", *here.notes()):
        _say(sentence)
    status = 0
    with ended_by_signals():
        try:
            found.go()
        except ToldToEnd as ended:
            status = 128 + ended.number
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
    said = text(found, subject, here.notes(), interrupted=status != 0)
    click.echo(said)
    if output is not None and status == 0:
        save(output, found, said, where["launcher"] if where["launcher"] in _CONTROLLERS else None)
        what = "the defaults, by which nothing changes" if found.best() is None else "what was adopted"
        _say(f"{output} holds {what}: hvdkit launch -n {n} --tuned {output} -- COMMAND")
    return status


def _say(sentence: str) -> None:
    click.echo(f"hvdkit tune: {sentence}", err=True)


def _launchers(here: Here) -> tuple[str, ...]:
    """The other one of mpirun and horovodrun, where the launcher is open and Horovod was built for both."""
    horovod, name = here.facts.horovod, here.plan.launcher_name
    if here.request.launcher != "auto" or name not in _CONTROLLERS or horovod is None:
        return ()
    works = {
        "mpirun": horovod.mpi and here.facts.mpi is not None,
        "horovodrun": horovod.gloo and here.facts.horovodrun is not None,
    }
    return tuple(launcher for launcher in _CONTROLLERS if works[launcher] and launcher != name)


def _threads(here: Here) -> tuple[int, ...]:
    """Thread counts to try; none where the cores of a rank are not known."""
    together = plan.ranks_on_a_host(here.plan.launcher_name, here.request)
    share = None if together is None else max(1, here.facts.cores // together)
    return thread_choices(here.request.depth or share, threads_asked(here.plan.environment))


def _default(here: Here) -> str:
    """The default settings, for a reader."""
    environment = here.plan.environment
    threads = environment.get("OMP_NUM_THREADS")
    words = [here.plan.launcher_name, f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS unset"]
    set_before = [name for name in ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD") if environment.get(name)]
    return ", ".join([*words, *(f"{name}={environment[name]}" for name in set_before)])


# The outcome


def verdict(search: Search, *, interrupted: bool = False) -> str:
    """What follows, in a few sentences."""
    leader = search.leader()
    if leader is None:
        so_far = "Nothing can be compared yet."
    elif leader[1] <= 1:
        so_far = f"Best so far are the defaults; next, unconfirmed: {label(leader[0])}, {leader[1]:.3f} times as fast."
    else:
        so_far = f"Best so far, unconfirmed: {label(leader[0])}, {leader[1]:.3f} times as fast as the default."
    if interrupted:
        return f"Interrupted: nothing is adopted and no file is written. {so_far}"
    confirmed, best = search.confirmed(), search.best()
    if best is not None:
        found = confirmed[best]
        return f"Adopted: {label(best)}, {found.ratio:.3f} times as fast as the default ({_interval(found)})."
    unsettled = [found for found in confirmed.values() if found.high > 1]
    if search.candidates and len(search.failures) == len(search.candidates):
        said = "Every setting but the default failed: the defaults stay."
    elif not search.finalists and not search.budget_ended:
        said = "Every setting was slower than the default beyond noise: the defaults stay."
    elif not confirmed and search.budget_ended:
        said = f"Could not tell: the budget was up before any setting could be confirmed. The defaults stay. {so_far}"
    elif unsettled and (search.budget_ended or not all(math.isfinite(found.high) for found in unsettled)):
        pairs = min(found.pairs for found in unsettled)
        said = (
            f"Could not tell: {'one pair' if pairs == 1 else f'{pairs} pairs'} of fresh runs of {search.confirmations} "
            f"leave open whether a setting is better. The defaults stay. {so_far}"
        )
    else:
        said = "No setting is better than the default beyond noise: the defaults stay."
    return f"{said} What costs a step time, hvdkit launch --explain-job says."


def text(search: Search, subject: str, notes: Sequence[str] = (), *, interrupted: bool = False) -> str:
    """The outcome for a reader.

    Args:
        subject: what was run, and with which default settings.
        notes: what a reader of the numbers should know, full sentences.
    """
    measured = f"measured: {search.measure}" if search.measure else "nothing was measured"
    lines = [
        f"Verdict: {verdict(search, interrupted=interrupted)}",
        "",
        f"{subject}; {measured}",
        *notes,
        "",
    ]
    width = max(len(label(setting)) for setting in (DEFAULT, *search.candidates))
    lines.append(f"{'setting':{width}}  runs  median s  speed-up in the runs that select")
    by_speedup = sorted(search.candidates, key=lambda setting: -(search.screening.ratio(setting) or 0.0))
    for setting in (DEFAULT, *by_speedup):
        seconds = [*search.screening.seconds(setting), *search.confirming.seconds(setting)]
        median = f"{statistics.median(seconds):.3f}" if seconds else "-"
        ratio = None if setting == DEFAULT else search.screening.ratio(setting)
        words = ["1"] if setting == DEFAULT else [] if ratio is None else [f"{ratio:.3f}"]
        words += ["finalist"] if setting in search.finalists else []
        words += ["failed"] if setting in search.failures else []
        lines.append(f"{label(setting):{width}}  {len(seconds):4}  {median:>8}  {', '.join(words)}".rstrip())
    if confirmed := search.confirmed():
        how = f"default / setting, paired by round, {share_text(CONFIDENCE)} Student t of the log ratios"
        how += f" for the {len(search.finalists)} together, Bonferroni" if len(search.finalists) > 1 else ""
        lines += ["", f"Fresh runs of the finalists ({how}):"]
        lines += [
            f"{label(setting):{width}}  {found.ratio:.3f}  {_interval(found)}, {found.pairs} pairs"
            for setting, found in confirmed.items()
        ]
    for setting, reason in search.failures.items():
        lines += ["", f"Dropped: {label(setting)}, whose job {reason}"]
    return "\n".join(lines)


def save(path: Path, search: Search, said: str, launcher: str | None = None) -> None:
    """Write what was adopted, or the defaults, for ``hvdkit launch --tuned``.

    Args:
        said: the outcome as ``text``, which is kept beside it.
        launcher: "mpirun" or "horovodrun" when every job was told to use it, else None.
    Raises:
        HvdkitError: it cannot be written.
    """
    best = search.best()
    if best is not None and launcher is not None:
        best = structs.replace(best, launcher=launcher)
    json_files.write(path, TunedFile(best or Tuned(), said.splitlines()))


def _interval(found: Speedup) -> str:
    return f"interval {found.low:.3f} to {found.high:.3f}"
