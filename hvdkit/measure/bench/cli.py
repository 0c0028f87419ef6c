"""The command ``hvdkit bench``: ``scaling`` measures, ``show`` prints and draws, ``synthetic`` can be measured."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from hvdkit.common import json_files
from hvdkit.common.commands import (
    AT_LEAST_0,
    AT_LEAST_1,
    FILE,
    PATH,
    group_of,
    numbers_of_ranks,
    output_file,
    seconds_above_0,
    with_options,
)
from hvdkit.common.table import readable
from hvdkit.errors import InvalidArgumentError, require_scipy
from hvdkit.jobs import trials
from hvdkit.jobs.launch import options
from hvdkit.jobs.trials import ToldToEnd, ended_by_signals
from hvdkit.measure.bench import laws, results
from hvdkit.measure.bench.analysis import analyse, draw, page
from hvdkit.measure.bench.jobs import go
from hvdkit.steps import launchers
from hvdkit.synthetic import benchmark

SUBCOMMANDS = {
    "scaling": ("hvdkit.measure.bench.cli:scaling", "Run a training on 1, 2, 4 ranks: how much faster is it?"),
    "show": ("hvdkit.measure.bench.cli:show", "Print the results of `scaling` again, as JSON, or plot them."),
    "synthetic": ("hvdkit.measure.bench.cli:synthetic", "Train on random data: how many images a second?"),
}
MOVED = {"report": "hvdkit bench show", "compare": "hvdkit diff"}
_NEEDS_SCIPY = "hvdkit bench fits the laws of scaling"
_JSON = click.option("--json", "form", flag_value="json", help="Print JSON: the summary of the file.")


@click.group(cls=group_of(SUBCOMMANDS, moved=MOVED))
def bench() -> None:
    """Measure how a training scales, with intervals that say how sure the numbers are.

    \b
      hvdkit bench scaling -n 1,2,4 -o results.json -- python train.py
      hvdkit diff before.json results.json --fail-below 0.95
      hvdkit bench synthetic --framework torch --model mlp -n 2

    Each subcommand has its own --help with an example.
    """


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
    "--timeout", type=float, callback=seconds_above_0, metavar="S", help="End a job after S seconds, as failed."
)
@with_options([options.OPTIONS[name] for name in ("launcher", "threads")])
@click.option("--ppn", type=AT_LEAST_1, metavar="P", help="Ranks per host; all N where N is smaller.")
@with_options([options.OPTIONS[name] for name in ("depth", "hosts", "hostfile", "variables")])
@with_options([_JSON])
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
def scaling(
    *,
    ranks: tuple[int, ...],
    output: Path,
    mode: str,
    repeats: int,
    warmup_steps: int,
    timeout: float | None,
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
      hvdkit bench scaling -n 1,2 --weak -o r.json -- hvdkit bench synthetic --model mlp
    """
    require_scipy(_NEEDS_SCIPY)

    def at(n: int) -> dict[str, Any]:
        """What is passed on to ``hvdkit launch`` on so many ranks; a host cannot have more ranks than there are."""
        return where if where["ppn"] is None else {**where, "ppn": min(where["ppn"], n)}

    asked = results.ScalingAsked(command, tuple(options.as_words(where)), ranks, mode, repeats, warmup_steps)
    found = results.resume(output, results.describe(asked, [trials.look(n, command, at(n)) for n in ranks]))

    def say(sentence: str) -> None:
        click.echo(f"hvdkit bench: {readable(sentence)}", err=True)

    status = 0
    with ended_by_signals():
        try:
            go(found, output, lambda n: trials.Launch(n, command, options.as_words(at(n))), timeout, say)
        except ToldToEnd as ended:
            status = 128 + ended.number
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
    analysis = analyse(found)
    json_files.write(output, structs.replace(found, summary=analysis))
    page(analysis).print(form, analysis)
    if status != 0:
        say("interrupted; the same command line goes on from here.")
        return status
    say(f"kept in {output}; `hvdkit bench show {shlex.quote(str(output))} --plot scaling.svg` draws it.")
    return 1 if any(row.seconds is None for row in analysis.rows) else 0


@click.command()
@click.argument("file", type=FILE)
@with_options([_JSON])
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE.svg|.png|.pdf",
    help="Draw speed-up and efficiency with their intervals and the ideal.",
)
def show(file: Path, form: str | None, plot: Path | None) -> int:
    """Print the results that `hvdkit bench scaling` wrote to FILE; nothing is run.

    \b
    Examples:
      hvdkit bench show results.json
      hvdkit bench show results.json --plot scaling.svg

    Exit status: 0 success, 1 FILE is something else or the plot cannot be drawn, 2 for bad usage.
    """
    require_scipy(_NEEDS_SCIPY)
    analysis = analyse(json_files.read(file, results.ScalingResults))
    if plot is not None:
        draw(analysis, plot, file)
    page(analysis).print(form, analysis)
    if plot is not None:
        click.echo(f"hvdkit bench: drawn to {plot}", err=True)
    return 0


@click.command()
@click.option("--framework", type=click.Choice(["torch", "tensorflow", "keras"]), default="torch")
@click.option("--model", type=click.Choice(list(benchmark.MODELS)), default="cnn")
@click.option("-n", "ranks", type=AT_LEAST_1, metavar="N", help="Start N ranks with `hvdkit launch`.")
@click.option(
    "--batch-size", "--batch_size", type=AT_LEAST_1, default=32, metavar="B", help="Images per step on each rank."
)
@click.option(
    "--num-warmup-batches",
    "warmup_batches",
    type=AT_LEAST_0,
    default=10,
    metavar="K",
    help="Warm-up steps, which are not counted.",
)
@click.option(
    "--num-batches-per-iter",
    "batches_per_iter",
    type=AT_LEAST_1,
    default=10,
    metavar="K",
    help="Steps per measurement.",
)
@click.option("--num-iters", "iters", type=AT_LEAST_1, default=10, metavar="K", help="Number of measurements.")
@click.option("--fp16-allreduce", is_flag=True, help="Send gradients in half precision.")
@click.option("--no-cuda", is_flag=True, help="Train on the CPU.")
@click.option(
    "--image-size",
    type=click.IntRange(min=benchmark.LEAST_IMAGE_SIZE),
    metavar="PIXELS",
    help=f"For resnet50-shape: height and width  [default: {benchmark.IMAGE_SIZE}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def synthetic(framework: str, ranks: int | None, no_cuda: bool, **rest: Any) -> int:
    """Train a model on random data, and report images per second.

    Flags and lines are those of Horovod's synthetic benchmarks. Without -n it runs as
    one rank of the job that started it, or alone. Every step is recorded: `hvdkit bench scaling --weak` can measure it.

    \b
      cnn             28 x 28, 1.2 million parameters    deep   60 layers of 256: many small tensors
      mlp             784-256-128-64-10                  wide   20 million parameters in 6 tensors
      resnet50-shape  ResNet-50: 25.6 million parameters in 161 tensors; --image-size 64 makes it cheap

    \b
    Examples:
      hvdkit bench synthetic --framework torch --model mlp -n 2
      hvdkit launch -n 4 --ppn 2 -- hvdkit bench synthetic --model resnet50-shape --image-size 64
      hvdkit bench scaling -n 1,2 --weak -o r.json -- hvdkit bench synthetic --framework tensorflow --num-iters 5

    Exit status: 0; 1 when the framework or Horovod is missing or the job failed; 2 for bad usage.
    """
    settings = benchmark.BenchmarkSettings(cuda=not no_cuda, **rest)
    argv = [sys.executable, "-P", "-m", "hvdkit.synthetic", framework, settings.word()]
    if ranks is not None:
        inside = launchers.detect(os.environ)
        if inside is not None:
            raise InvalidArgumentError(
                f"-n {ranks} starts a job, and this is a rank of one already (started by {inside.launcher}); leave -n "
                "out."
            )
        argv = [sys.executable, "-P", "-m", "hvdkit.cli", "launch", "-n", str(ranks), "--no-tag", "--", *argv]
    sys.stdout.flush()
    os.execv(argv[0], argv)  # noqa: S606
