"""``hvdkit bench scaling`` and ``hvdkit bench show``."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from hvdkit.bench import laws, results, tables
from hvdkit.bench.analysis import Analysis, analyse, ranks_text
from hvdkit.bench.results import Results
from hvdkit.bench.scaling import Jobs, Watcher, go
from hvdkit.bench.subject import Asked, describe
from hvdkit.errors import MissingFrameworkError
from hvdkit.launch import plan
from hvdkit.launch.options import environment_variables
from hvdkit.tune import here
from hvdkit.tune.progress import Ended, ended_by_signals


def _ranks(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise click.BadParameter(f"expected numbers of ranks with commas between them, like 1,2,4, got {text!r}")
    return tuple(sorted({int(word) for word in words}))


def _output(_ctx: click.Context, _parameter: click.Parameter, file: Path) -> Path:
    if file.is_dir():
        raise click.BadParameter(f"{str(file)!r} is a directory; give the path of a file in it")
    if not os.access(file.absolute().parent, os.W_OK):
        raise click.BadParameter(f"directory {str(file.absolute().parent)!r} does not exist or cannot be written to")
    return file


def _timeout(_ctx: click.Context, _parameter: click.Parameter, seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise click.BadParameter(f"expected a number of seconds above 0, got {seconds}")
    return seconds


_FORMS = (
    click.option("--markdown", "form", flag_value="markdown", help="Print Markdown."),
    click.option("--csv", "form", flag_value="csv", help="Print CSV, a line for each number of ranks."),
    click.option("--json", "form", flag_value="json", help="Print JSON: the summary of the file."),
)


class _Shown(Watcher):
    """Progress on standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)

    def begins(self, ranks: int, repeat: int, done: int, total: int) -> None:
        self.says(f"job {done + 1} of {total}: {ranks_text(ranks)}, repeat {repeat + 1}")

    def says(self, sentence: str) -> None:
        self._console.print(f"hvdkit bench: {sentence}", soft_wrap=True)


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("-n", "ranks", required=True, callback=_ranks, metavar="N,...", help="Numbers of ranks, such as 1,2,4.")
@click.option(
    "-o",
    "output",
    type=click.Path(path_type=Path),
    required=True,
    callback=_output,
    metavar="FILE",
    help="Keep what is measured here, after every job; a second call goes on where the first was interrupted. On "
    "several hosts, in a directory that they share.",
)
@click.option(
    "--strong",
    "mode",
    flag_value=laws.STRONG,
    default=laws.STRONG,
    help="All ranks together do the same work at every N (an epoch of the same data). The default.",
)
@click.option("--weak", "mode", flag_value=laws.WEAK, help="Each rank does the same work in a step at every N.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=5, show_default=True, metavar="R", help="Jobs at each N."
)
@click.option(
    "--warmup-steps",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="K",
    help="First steps of each job that are left out.",
)
@click.option("--timeout", type=float, callback=_timeout, metavar="S", help="End a job after S seconds, as failed.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order of the jobs.")
@click.option(
    "--launcher",
    type=click.Choice(["auto", *plan.LAUNCHERS]),
    default="auto",
    show_default=True,
    help="As in `hvdkit launch`; so are the next six.",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="T")
@click.option("--ppn", type=click.IntRange(min=1), metavar="P")
@click.option("--depth", type=click.IntRange(min=1), metavar="D")
@click.option("--hosts", metavar="H:S,...")
@click.option("--hostfile", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--env", "variables", multiple=True, callback=environment_variables, metavar="NAME=VALUE")
@_FORMS[0]
@_FORMS[1]
@_FORMS[2]
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def scaling(
    ranks: tuple[int, ...],
    output: Path,
    mode: str,
    repeats: int,
    warmup_steps: int,
    timeout: float | None,
    seed: int,
    launcher: str,
    threads: int | None,
    ppn: int | None,
    depth: int | None,
    hosts: str | None,
    hostfile: Path | None,
    variables: Mapping[str, str],
    form: str | None,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND on each of N ranks several times, in random order, and say how it scales.

    Measured are the steps that COMMAND records with `for x, y in hk.record_steps(loader)` (Keras: the callback
    hk.RecordSteps()), the slowest rank's, without the warm-up; else the seconds of its closing line
    `Hvd Procs N Total time: X second`. Progress is on standard error.

    Exit status: 0; 1 when at some N no job counts; 130 after Ctrl-C, after which the same command line goes on.

    \b
    Examples:
      hvdkit bench scaling -n 1,2,4 -o results.json -- python examples/pytorch/cnn.py --epochs 2
      hvdkit bench scaling -n 1,2,4 --weak --threads 1 -o weak.json -- python train.py
    """
    _require_scipy()
    wish = here.Wish(1, command, launcher, ppn, depth, hosts, hostfile, variables, threads)
    asked = Asked(command, tuple(wish.options()), ranks, mode, repeats, warmup_steps, seed)
    subject = describe(asked, [here.look(replace(wish, n=n)) for n in ranks])
    found = results.resume(output, subject)
    status = _run(asked, found, output, timeout)
    analysis = analyse(found)
    results.write(output, found, analysis.as_json())
    click.echo(_text(analysis, form), nl=False)
    if status != 0:
        click.echo("hvdkit bench: interrupted; the same command line goes on from here.", err=True)
        return status
    return 1 if any(row.seconds is None for row in analysis.rows) else 0


def _require_scipy() -> None:
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise MissingFrameworkError(
            "hvdkit bench fits the laws of scaling with SciPy, which is not installed; pip install 'hvdkit[bench]'"
        ) from error


def _run(asked: Asked, found: Results, output: Path, timeout_s: float | None) -> int:
    """Run what is missing; 0, or 128 and the number of the signal that ended it."""
    jobs = Jobs(asked.command, asked.options, asked.warmup_steps, output.absolute().parent, timeout_s)
    with ended_by_signals():
        try:
            go(asked, jobs, found, lambda: results.write(output, found), _Shown())
        except Ended as ended:
            return 128 + ended.number
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


def _text(analysis: Analysis, form: str | None) -> str:
    if form == "json":
        return json.dumps(analysis.as_json(), indent=2) + "\n"
    if form == "csv":
        return tables.comma_separated(analysis)
    if form == "markdown":
        return tables.markdown(analysis) + "\n"
    console = Console(highlight=False, markup=False)
    with console.capture() as captured:
        tables.show(analysis, console)
    return captured.get()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@_FORMS[0]
@_FORMS[1]
@_FORMS[2]
def show(file: Path, form: str | None) -> int:
    """Print what `hvdkit bench scaling` wrote to FILE; nothing is run.

    \b
    Example:
      hvdkit bench show results.json --markdown >> README.md
    """
    _require_scipy()
    click.echo(_text(analyse(results.read(file)), form), nl=False)
    return 0
