"""``hvdkit emulate sizes``, and the options that choose a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdkit.common import json_files
from hvdkit.common.commands import AT_LEAST_1, PATH, is_count, not_below_0, shortened, whole_numbers, with_options
from hvdkit.measure.emulate.plan import DTYPES, TRIALS
from hvdkit.measure.emulate.sizes import FRAMEWORKS, LAYERS, PER, REPLAY, plan_of


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
        "--csv",
        "csv_file",
        type=PATH,
        metavar="FILE",
        help="A table with the columns name, bytes or elements, dtype, gap_ms; or with bytes alone.",
    ),
    click.option(
        "--model",
        metavar="MODULE:FACTORY",
        help="A function (or class) that returns a model, or (model, inputs); PyTorch, Keras or TensorFlow. "
        "FILE.py:FACTORY works too.",
    ),
    click.option("--framework", type=click.Choice(FRAMEWORKS), help="Framework of the model  [default: auto]"),
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
    click.option("--dtype", type=click.Choice(DTYPES), help="Data type for --sizes and --csv  [default: float32]"),
    click.option(
        "--order",
        type=click.Choice([LAYERS, REPLAY]),
        help="Order for --sizes and --csv. layers: from the last to the first, as in backward; replay: as listed  "
        "[default: layers]",
    ),
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
"""Options that choose a plan, for ``sizes.plan_of``."""


@click.command()
@with_options(PLAN_OPTIONS)
@click.option("-o", "output", type=PATH, metavar="FILE", help="Save the plan, for --plan.")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
def sizes(output: Path | None, form: str | None, **wanted: Any) -> int:
    """List the collectives of a training step, their sizes and their order: the plan of an emulation.

    Nothing is replayed. A model is made in a process of its own, which imports MODULE from the current directory. With
    inputs, one backward is run or traced, and gradients keep the order in which they arrive.

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
    from hvdkit.measure.emulate.tables import plan_page

    plan_page(plan).print(form, plan)
    if output is not None and form is None:
        click.echo(f"Saved as {output}.")
    return 0
