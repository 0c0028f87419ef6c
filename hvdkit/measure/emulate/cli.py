"""The command ``hvdkit emulate``: without a subcommand it measures; the others make plans and read results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1, PATH, group_of, output_file, seconds_above_0, with_options
from hvdkit.measure.emulate import outputs, run, run_setup, tables
from hvdkit.measure.emulate import results as kept
from hvdkit.measure.emulate.analysis import analyse
from hvdkit.measure.emulate.check import ALLREDUCE, COLLECTIVES
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.emulate.run_job import BUSY, COMPUTE
from hvdkit.measure.emulate.sizes_cli import PLAN_OPTIONS
from hvdkit.run.launch import options

SUBCOMMANDS = {
    "sizes": (
        "hvdkit.measure.emulate.sizes_cli:sizes",
        "List the collectives of a step, and save the plan.",
    ),
    "plan": ("hvdkit.measure.emulate.sizes_cli:sizes", "Another name of `sizes`."),
    "show": ("hvdkit.measure.emulate.show_cli:show", "Print the results again, or in another form."),
    "compare": (
        "hvdkit.measure.emulate.show_cli:compare",
        "Compare two results: is the second one slower?",
    ),
}


_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option("-n", "n", type=AT_LEAST_1, metavar="N", help="Number of processes (ranks)."),
    click.option(
        "--engine",
        type=click.Choice(list(run_setup.ENGINES)),
        default="horovod",
        help="What runs the collectives: Horovod, MPI's own choice (mpi), this tool's ring over MPI messages "
        "(ring), torch.distributed (torch: NCCL where there are GPUs, else Gloo; or name one of the two).",
    ),
    click.option("--collective", type=click.Choice(COLLECTIVES), default=ALLREDUCE),
    click.option(
        "--algorithm",
        type=click.Choice(["library", "ring"]),
        help="`--engine mpi --algorithm ring` is `--engine ring`  [default: what the engine says]",
    ),
    click.option(
        "--fusion",
        type=click.Choice(["on", "off"]),
        help="on: Horovod gets all tensors of a step at once, as in a training, and may fuse them; off: one after the "
        "other, each alone  [default: on; off with --begin]",
    ),
    *options.OF_HOROVOD,
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
        "--compute",
        type=click.Choice(COMPUTE),
        default=BUSY,
        help="What a rank does between collectives: multiply matrices (which keeps its core busy) or sleep.",
    ),
    click.option(
        "--check/--no-check",
        default=True,
        help="Check every element of every result on every rank, outside the measured time.",
    ),
    click.option("--seed", type=AT_LEAST_0, default=0, help="Random seed of the delays."),
    click.option(
        "--json",
        type=PATH,
        callback=output_file,
        metavar="FILE",
        help="Write all samples and the summary (docs/json.md).",
    ),
    *outputs.OPTIONS,
    *(options.OPTIONS[name] for name in ("launcher", "hosts", "hostfile", "ppn", "threads", "variables")),
    click.option("--timeout", type=float, callback=seconds_above_0, metavar="S", help="End the job after S seconds."),
)


@click.group(cls=group_of(SUBCOMMANDS), invoke_without_command=True)
@with_options(_OPTIONS)
@with_options(PLAN_OPTIONS)
@click.pass_context
def emulate(ctx: click.Context, /, n: int | None, **wanted: Any) -> int | None:
    """Replay the collectives of a training without its model, on N processes, and measure every one of them.

    It replays the collectives of a step, last layer first, as often as the training has steps. They come from --sizes,
    --begin and --end, --csv, --model, --timeline or --plan (see `hvdkit emulate sizes --help`). Ranks contribute
    integers with known sums, and every result is checked. A wrong one ends the job with its rank, collective and
    element.

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
        _refuse_options(ctx)
        return None
    if n is None:
        raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
    files = {name: wanted.pop(name) for name in ("plot", "size_plot", "report")}
    timeout_s, json_file = wanted.pop("timeout"), wanted["json"]
    outputs.check(files, json_file)
    setup = run_setup.prepare(n, **wanted)
    joined, status = run.measure(setup.job, setup.options, setup.tuned, setup.beside, timeout_s, _say)
    _show(setup.results(joined), json_file, files)
    return status


def _refuse_options(ctx: click.Context) -> None:
    """Options of the measurement before a subcommand would do nothing."""
    for parameter in ctx.command.params:
        if parameter.name is not None and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} is given before {ctx.invoked_subcommand!r}, which measures nothing; give the "
                "options of a subcommand after its name",
                ctx,
            )


def _show(found: EmulateResults, json_file: Path | None, files: dict[str, Path | None]) -> None:
    """Print the table and write the files; of nothing measured, only the JSON that says so."""
    analysis = analyse(found) if found.samples else None
    if json_file is not None:
        kept.write(json_file, found, analysis)
    if analysis is None:
        _say("nothing was measured by all ranks.")
        return
    tables.page(analysis).print(None, analysis)
    outputs.write_all(found, analysis, files)


def _say(sentence: str) -> None:
    click.echo(f"hvdkit emulate: {sentence}", err=True)
