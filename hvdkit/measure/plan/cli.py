"""``hvdkit plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdkit.common import json_files
from hvdkit.common.commands import AT_LEAST_1, FILE, PATH, large_count, number, numbers_of_ranks, output_file
from hvdkit.common.intervals import Estimate
from hvdkit.common.units import ITEM_SIZES
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.plan import model, tables
from hvdkit.steps.epochs import REMAINDERS
from hvdkit.steps.learning_rate import RULES

if TYPE_CHECKING:
    from hvdkit.measure.emulate.results import EmulateResults

_WHOLE = click.IntRange(min=1, max=model.MOST)
_MOST_EPOCHS = 10**6
_DTYPES = ("float16", "bfloat16", "float32", "float64")


@click.command()
@click.option("--samples", callback=large_count, required=True, metavar="S", help="Samples in the training set.")
@click.option("--batch-size", type=_WHOLE, required=True, metavar="B", help="Samples per step on each rank.")
@click.option(
    "--lr",
    type=float,
    callback=number(0, above=True),
    required=True,
    metavar="L",
    help="Learning rate for one process.",
)
@click.option("--epochs", type=click.IntRange(1, _MOST_EPOCHS), default=1, metavar="E")
@click.option(
    "-n", "ranks", required=True, callback=numbers_of_ranks, metavar="N,...", help="Numbers of ranks, such as 1,2,4,8."
)
@click.option(
    "--rule", type=click.Choice(RULES), default="linear", help="How the learning rate scales with the number of ranks."
)
@click.option(
    "--warmup-epochs",
    type=float,
    callback=number(0, most=_MOST_EPOCHS),
    default=5.0,
    metavar="W",
    help="Epochs of warmup; 0 for none.",
)
@click.option(
    "--remainder",
    type=click.Choice(REMAINDERS),
    default="drop",
    help="What happens to the last, incomplete batch of an epoch. All three are shown; steps are counted for this one.",
)
@click.option(
    "--checkpoint-epochs",
    type=AT_LEAST_1,
    default=1,
    metavar="K",
    help="Save a checkpoint every K epochs and after the last one.",
)
@click.option(
    "--parameters", callback=large_count, metavar="P", help="Number of parameters of the model, such as 25557032 or 7B."
)
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", help="Data type of the gradients.")
@click.option(
    "--fit",
    "fits",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="A file of `hvdkit emulate --fusion off --json`: how long the allreduce of the gradients takes and, without "
    "--parameters, how large they are. May be repeated.",
)
@click.option(
    "--plot", type=PATH, callback=output_file, metavar="FILE", help="Draw the learning rate (.svg, .png, .pdf)."
)
@click.option("--markdown", "form", flag_value="markdown", help="Print Markdown.")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
def plan(
    *,
    samples: int,
    batch_size: int,
    lr: float,
    epochs: int,
    ranks: tuple[int, ...],
    rule: str,
    warmup_epochs: float,
    remainder: str,
    checkpoint_epochs: int,
    parameters: int | None,
    dtype: str,
    fits: tuple[Path, ...],
    plot: Path | None,
    form: str | None,
) -> int:
    """Show what a training will do on each number of ranks; nothing is started.

    The training will get the same numbers from hvdkit's functions. They are steps per epoch, global batch,
    samples that a remainder policy leaves out or uses twice, the learning rate with its warmup, checkpoints and the
    size of the gradients.

    \b
    Examples:
      hvdkit plan --samples 60000 --batch-size 64 --lr 0.01 --epochs 12 -n 1,2,4,8
      hvdkit plan --samples 60000 --batch-size 512 --lr 0.01 --epochs 50 -n 8 --warmup-epochs 3 --plot rates.svg
      hvdkit plan --samples 1281167 --batch-size 256 --lr 0.1 --epochs 90 -n 8,64 --parameters 25557032
      hvdkit plan --samples 60000 --batch-size 512 --lr 0.01 --epochs 50 -n 1,2 --fit emulate.json
    """
    measured = _read(fits)
    gradient_bytes = _replayed(measured) if parameters is None else parameters * ITEM_SIZES[dtype]
    training = model.PlannedTraining(
        samples=samples,
        batch_size=batch_size,
        base_lr=lr,
        epochs=epochs,
        rule=rule,
        warmup_epochs=warmup_epochs,
        remainder=remainder,
        checkpoint_epochs=checkpoint_epochs,
        gradient_bytes=gradient_bytes,
    )
    predicted, unknown = _predict(measured, gradient_bytes, ranks)
    rows = [model.row(training, n, seconds) for n, seconds in zip(ranks, predicted, strict=True)]
    notes = [*model.notes(training, rows), *unknown]
    if measured and parameters is None:
        notes.append("The size of the gradients is what the collectives of a step in --fit add up to.")
    if plot is not None:
        tables.write(plot, training, rows)
    tables.page(training, rows, notes).print(form, model.Planned(training, tuple(rows), tuple(notes)))
    return 0


def _read(fits: Sequence[Path]) -> list[EmulateResults]:
    if not fits:
        return []
    from hvdkit.measure.emulate.results import EmulateResults

    return [json_files.read(path, EmulateResults) for path in fits]


def _replayed(measured: Sequence[EmulateResults]) -> int | None:
    """Bytes of the step that every measurement replayed; None without a measurement."""
    sizes = sorted({one.plan.nbytes for one in measured})
    if len(sizes) > 1:
        raise InvalidArgumentError(
            f"the files of --fit replayed steps of {sizes[0]} to {sizes[-1]} bytes, which tells no size of the "
            "gradients; give --parameters, too."
        )
    return sizes[0] if sizes else None


def _predict(
    measured: Sequence[EmulateResults], gradient_bytes: int | None, ranks: Sequence[int]
) -> tuple[list[Estimate | None], list[str]]:
    """Seconds for each number of ranks, None where the measurements do not reach, and a sentence on each of those."""
    if not measured or gradient_bytes is None:
        return [None] * len(ranks), []
    from hvdkit.measure.predict.model import fit

    costs = fit(measured)
    found: list[Estimate | None] = []
    unknown = []
    for n in ranks:
        try:
            found.append(costs.allreduce_s(gradient_bytes, n))
        except InvalidArgumentError:
            found.append(None)
            unknown.append(
                f"On {n} ranks: no time of the allreduce is predicted, since so many need other links than those that "
                "were measured; measure with 'hvdkit emulate --hosts', or give 'hvdkit predict' the network's "
                "--alpha-us and --bandwidth-gbit, or --ppn."
            )
    return found, unknown
