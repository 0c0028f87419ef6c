"""The command ``hvdkit emulate``: without a subcommand it measures; ``sizes`` makes plans, ``show`` reads results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdkit.common import json_files
from hvdkit.common import plot as plots
from hvdkit.common.commands import (
    AT_LEAST_0,
    AT_LEAST_1,
    FILE,
    PATH,
    group_of,
    is_count,
    not_below_0,
    output_file,
    seconds_above_0,
    shortened,
    whole_numbers,
    with_options,
)
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch import options
from hvdkit.measure.emulate import results, run
from hvdkit.measure.emulate.analysis import analyse, draw, page, plan_page
from hvdkit.measure.emulate.check import ALLREDUCE, COLLECTIVES, ROUNDING
from hvdkit.measure.emulate.plan import DTYPES, PER, TRIALS, plan_of

SUBCOMMANDS = {
    "sizes": ("hvdkit.measure.emulate.cli:sizes", "List the collectives of a step, and save the plan."),
    "show": ("hvdkit.measure.emulate.cli:show", "Print the results again, as JSON, or plot them."),
}
MOVED = {"plan": "hvdkit emulate sizes", "compare": "hvdkit diff"}


def _bytes(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    power = "KMGT".find(text[-1:].upper()) + 1 if text else 0
    digits = text[:-1] if power else text
    if not is_count(digits):
        raise click.BadParameter(f"expected bytes such as 8, 32K, 128M or 1G (1K is 1024), got {shortened(text)}")
    return int(digits) << 10 * power


PLAN_OPTIONS = (
    click.option("--sizes", callback=whole_numbers, metavar="B,B,...", help="Sizes in bytes, first layer first."),
    click.option(
        "-b",
        "--begin",
        "--minbytes",
        "begin",
        callback=_bytes,
        metavar="B",
        help="As nccl-tests: sizes from B bytes (8, 32K, 128M) to --end, each alone, smallest first.",
    ),
    click.option("-e", "--end", "--maxbytes", "end", callback=_bytes, metavar="B", help="Largest size of the sweep."),
    click.option(
        "-f",
        "--factor",
        "--stepfactor",
        "factor",
        type=click.IntRange(min=2),
        metavar="F",
        help="Factor between two sizes of the sweep  [default: 2]",
    ),
    click.option(
        "--model",
        metavar="MODULE:FACTORY",
        help="A function (or class) that returns a model of PyTorch or Keras, or (model, inputs). Also "
        "FILE.py:FACTORY.",
    ),
    click.option("--per", type=click.Choice(PER), help="One collective per ... of the model  [default: parameter]"),
    click.option(
        "--input-shape",
        callback=whole_numbers,
        metavar="N,N,...",
        help="Shape of an input of zeros, batch first, such as 2,784; for a FACTORY that returns no inputs.",
    ),
    click.option(
        "--timeline", type=PATH, metavar="FILE", help="A Horovod timeline: take sizes, order and gaps from it."
    ),
    click.option("--plan", "plan_file", type=PATH, metavar="FILE", help="A plan that `hvdkit emulate sizes -o` saved."),
    click.option("--dtype", type=click.Choice(DTYPES), help="Data type for --sizes and --begin  [default: float32]"),
    click.option(
        "--trials", type=AT_LEAST_1, metavar="T", help=f"Steps to replay  [default: the plan's, else {TRIALS}]"
    ),
    click.option(
        "--samples",
        type=AT_LEAST_1,
        metavar="S",
        help="Samples of the data set, in place of --trials: then T is S / B, rounded up, times E.",
    ),
    click.option(
        "--batch-size", type=AT_LEAST_1, metavar="B", help="Global batch size: samples per step of all ranks."
    ),
    click.option("--epochs", type=AT_LEAST_1, metavar="E", help="Passes over the data set  [default: 1]"),
    click.option(
        "--gap-ms",
        type=float,
        callback=not_below_0,
        metavar="MS",
        help="Computation before each collective  [default: what FILE says, else 0]",
    ),
)
"""Options that choose a plan, for ``plan.plan_of``."""
_PLOT = click.option(
    "--plot",
    type=PATH,
    callback=output_file,
    metavar="FILE",
    help="Draw the distribution of the delays (.svg, .png, .pdf).",
)
_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option("-n", "n", type=AT_LEAST_1, metavar="N", help="Number of processes (ranks)."),
    click.option(
        "--engine",
        type=click.Choice(results.ENGINES),
        default=results.HOROVOD,
        help="What runs the collectives: Horovod, MPI's own choice (mpi), this tool's ring over MPI messages "
        "(ring), torch.distributed (torch: NCCL where there are GPUs, else Gloo; or name one of the two).",
    ),
    click.option("--collective", type=click.Choice(COLLECTIVES), default=ALLREDUCE),
    click.option(
        "--compression",
        type=click.Choice(list(ROUNDING)),
        default="none",
        help="Replay each step once more in fewer bytes, as distribute(compression=) sends it, beside none.",
    ),
    click.option(
        "--fusion",
        type=click.Choice(["on", "off"]),
        help="on: Horovod gets all tensors of a step at once, as in a training, and may fuse them; off: one after the "
        "other, each alone  [default: on; off with --begin]",
    ),
    click.option(
        "--warmup-trials", type=AT_LEAST_0, default=2, metavar="K", help="Warm-up steps, which are not counted."
    ),
    click.option(
        "--straggler", multiple=True, metavar="RANK:MS", help="Delay this rank before every collective; repeatable."
    ),
    click.option(
        "--delay",
        metavar="MS[:RANK[:P]]",
        help="Delay collectives at random: exponential with mean MS, on one rank or on all (*), with "
        "probability P  [default: all, 1]",
    ),
    click.option(
        "--check/--no-check",
        default=True,
        help="Check every element of every result on every rank, outside the measured time.",
    ),
    click.option("--json", type=PATH, callback=output_file, metavar="FILE", help="Write all samples (docs/json.md)."),
    _PLOT,
    *(options.OPTIONS[name] for name in ("launcher", "hosts", "hostfile", "ppn", "threads", "variables")),
    click.option("--timeout", type=float, callback=seconds_above_0, metavar="S", help="End the job after S seconds."),
)


@click.group(cls=group_of(SUBCOMMANDS, moved=MOVED), invoke_without_command=True)
@with_options(_OPTIONS)
@with_options(PLAN_OPTIONS)
@click.pass_context
def emulate(ctx: click.Context, /, n: int | None, plot: Path | None, **wanted: Any) -> int | None:
    """Replay the collectives of a training without its model, on N processes, and measure every one of them.

    It replays the collectives of a step, last layer first, as often as the training has steps. They come from --sizes,
    --begin and --end, --model, --timeline or --plan (see `hvdkit emulate sizes --help`). Ranks contribute integers with
    known sums, and every result is checked. A wrong one ends the job with its rank, collective and element.

    A collective's time has two parts: skew, from the first rank's arrival to the last one's, and transfer, from then
    until the last rank is done. Algorithm and bus bandwidth are of the transfer, as in nccl-tests.

    Exit status: 0; 1 when a result is wrong or the job fails; 2 for bad usage; 130 after Ctrl-C, which keeps the
    measurements so far. On several hosts, start it in a directory that they share.

    \b
    Examples:
      hvdkit emulate -n 4 --sizes 803840,131584,33024,2600 --samples 60000 --batch-size 8192
      hvdkit emulate -n 4 --engine ring --sizes 40000000 --trials 100 --json ring.json --plot cdf.svg
      hvdkit emulate -n 4 --begin 8 --end 128M --factor 2
      hvdkit emulate -n 4 --engine gloo --model nets:Classifier --straggler 2:50
      hvdkit emulate -n 8 --hosts h1:4,h2:4 --engine mpi --plan plan.json --json mpi.json
    """
    if ctx.invoked_subcommand is not None:
        for parameter in ctx.command.params:  # options of the measurement would do nothing
            if parameter.name is not None and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"{parameter.opts[0]} is given before {ctx.invoked_subcommand!r}, which measures nothing; give the "
                    "options of a subcommand after its name",
                    ctx,
                )
        return None
    if n is None:
        raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
    json_file = wanted["json"]
    _check_plot(plot, json_file)
    found, status, failure = run.measure(n, **wanted)
    if failure is not None:
        _say(failure)
    if json_file is not None:
        json_files.write(json_file, found)
    if not found.samples:
        _say("nothing was measured by all ranks.")
        return status
    analysis = analyse(found)
    page(found, analysis).print(None, analysis)
    if plot is not None:
        draw(plot, found, analysis)
    return status


def _check_plot(path: Path | None, other: Path | None) -> None:
    """Find out before anything is measured whether a plot can be made, and is not another file that is named."""
    if path is None:
        return
    plots.check(path)
    plots.require()
    if other is not None and path.resolve() == other.resolve():
        raise InvalidArgumentError(f"The file {str(path)!r} is named for two things; give each a file of its own.")


def _say(sentence: str) -> None:
    click.echo(f"hvdkit emulate: {sentence}", err=True)


@click.command()
@with_options(PLAN_OPTIONS)
@click.option("-o", "output", type=PATH, metavar="FILE", help="Save the plan, for --plan.")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
def sizes(output: Path | None, form: str | None, **wanted: Any) -> int:
    """List the collectives of a training step, their sizes and their order: the plan of an emulation.

    Nothing is replayed. A model is made in a process of its own, which imports MODULE from the current directory. With
    inputs, one backward of a PyTorch model is run, and gradients keep the order in which they arrive.

    \b
    Examples:
      hvdkit emulate sizes --sizes 803840,131584,33024,2600 --samples 60000 --batch-size 8192
      hvdkit emulate sizes --model nets:Classifier --input-shape 2,784 --per layer -o plan.json
      hvdkit emulate sizes --timeline timeline.json -o plan.json
      hvdkit emulate --engine ring -n 4 --plan plan.json

    Exit status: 0 success, 1 a file cannot be used, 2 for bad usage.
    """
    plan = plan_of(**wanted)
    if output is not None:
        json_files.write(output, plan)
    plan_page(plan).print(form, plan)
    if output is not None and form is None:
        click.echo(f"Saved as {output}.")
    return 0


@click.command()
@click.argument("file", type=FILE)
@click.option("--json", "form", flag_value="json", help="Print JSON: the analysis.")
@with_options([_PLOT])
def show(file: Path, form: str | None, plot: Path | None) -> int:
    """Print the results of `hvdkit emulate --json FILE` again, or draw them; nothing is run.

    \b
    Examples:
      hvdkit emulate show results.json
      hvdkit emulate show results.json --plot cdf.svg

    Exit status: 0 success, 1 the file cannot be used, 2 for bad usage.
    """
    _check_plot(plot, file)
    found = json_files.read(file, results.EmulateResults)
    analysis = analyse(found)
    if plot is not None:
        draw(plot, found, analysis)
    page(found, analysis).print(form, analysis)
    return 0
