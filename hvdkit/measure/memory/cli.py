"""``hvdkit memory``: its options, the questions to a live model, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from hvdkit.common.commands import large_count, number, numbers_of_ranks, whole_numbers
from hvdkit.common.table import Page, Table
from hvdkit.common.units import bytes_text, change_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.memory import terms
from hvdkit.measure.memory.terms import Need, PerRank
from hvdkit.measure.model_factory import ask

FRAMEWORKS = ("auto", "torch", "keras")
DEVICES = ("cpu", "meta")

_TERMS = ("parameters", "gradients", "states", "activations", "fusion_buffer", "compression")
_OF_NUMBERS = ("parameters", "dtype", "mixed", "layers", "sequence", "hidden", "heads")
_OF_MODELS = ("framework", "input_shape", "device", "measure")
_WHOLE = click.IntRange(min=1, max=10**9)
"""Beyond these, numbers are typing errors, and their products no numbers that a table can show."""
_COMMAND_LINE = click.core.ParameterSource.COMMANDLINE


@click.command()
@click.option("--model", metavar="MODULE:FACTORY", help="Also FILE.py:FACTORY: a function that returns a model, "
              "(model, inputs) or (model, inputs, loss function of the output).")  # fmt: skip
@click.option("--parameters", callback=large_count, metavar="P", help="Number of parameters: 25557032, 1e12, 7B.")
@click.option("--batch", "--batch-size", "batch", type=_WHOLE, default=1, metavar="B", help="Samples on a rank.")
@click.option("--optimizer", type=click.Choice(list(terms.STATES)), default="adam")
@click.option("--dtype", type=click.Choice(terms.DTYPES), default="float32",
              help="Data type of parameters, gradients and activations (with --parameters).")  # fmt: skip
@click.option("--mixed", is_flag=True, help="The optimizer keeps float32 states and a float32 copy of the parameters.")
@click.option(
    "--layers", type=_WHOLE, metavar="L", help="Layers of a transformer; with --sequence, --hidden and --heads."
)
@click.option("--sequence", type=_WHOLE, metavar="S", help="Tokens per sample.")
@click.option("--hidden", type=_WHOLE, metavar="H", help="Width of a layer.")
@click.option(
    "--heads", type=_WHOLE, metavar="A", help="Attention heads; counts all activations of a layer, not only its output."
)
@click.option("--framework", type=click.Choice(FRAMEWORKS), default="auto")
@click.option("--input-shape", callback=whole_numbers, metavar="B,...", help="Shape of an input of zeros, batch first.")
@click.option("--device", type=click.Choice(DEVICES), default="cpu",
              help="Device on which small steps of the model run; meta computes shapes only.")  # fmt: skip
@click.option("--measure", is_flag=True, help="Also run real steps with B samples here, and compare (PyTorch).")
@click.option("--fp16-allreduce", is_flag=True, help="Send gradients in half precision.")
@click.option("--fusion-threshold-mb", type=click.FloatRange(min=0), callback=number(0), metavar="MB",
              help="Horovod's fusion buffer, in MiB  [default: 128]")  # fmt: skip
@click.option("-n", "ranks", callback=numbers_of_ranks, default="1,8,64", metavar="N,...")
@click.option("--capacity-gb", type=click.FloatRange(min=0, min_open=True), callback=number(0, above=True),
              metavar="GB", help="Memory of one rank's device.")  # fmt: skip
@click.option("--markdown", "form", flag_value="markdown", help="Print Markdown.")
@click.option("--json", "form", flag_value="json", help="Print JSON; sizes are bytes.")
@click.pass_context
def memory(
    ctx: click.Context, /, form: str | None, ranks: tuple[int, ...], capacity_gb: float | None, **wanted: Any
) -> int:
    """Estimate the memory of a training on each rank: parameters, gradients, optimizer, activations, buffers.

    For a real model, small steps are run and extrapolated to B samples; for plain numbers the terms are computed. Plain
    data parallelism needs all of it on every rank; the savings of ZeRO's stages are shown beside it.

    Exit status: 0; 1 when a rank needs more than --capacity-gb with data parallelism, or this cannot be told
    without its activations.

    \b
    Examples:
      hvdkit memory --model nets.py:Net --input-shape 64,1,28,28 --batch 64 -n 1,8
      hvdkit memory --parameters 1e12 --dtype float16 --layers 120 --sequence 2048 --hidden 12288 --batch 128
      hvdkit memory --parameters 7B --dtype bfloat16 --mixed --capacity-gb 80 -n 8,64
    """
    need, said = _need(ctx, **wanted)
    rows = [terms.per_rank(need, n) for n in ranks]
    capacity = None if capacity_gb is None else round(1e9 * capacity_gb)
    notes = [*_notes_of_measuring(need, said), *terms.notes(need, rows, capacity)]
    found = terms.Memory(need, said.get("measured_peak"), tuple(rows), tuple(notes))
    _page(need, rows, notes).print(form, found)
    if capacity is None:
        return 0
    return 1 if need.activations is None or any(row.data_parallel > capacity for row in rows) else 0


def _need(
    ctx: click.Context, *, model: str | None, fusion_threshold_mb: float | None, **wanted: Any
) -> tuple[Need, dict[str, Any]]:
    if (model is None) == (wanted["parameters"] is None):
        raise InvalidArgumentError("give either --model or --parameters, and not both.")
    foreign = _OF_NUMBERS if model is not None else _OF_MODELS
    given = [f"--{name.replace('_', '-')}" for name in foreign if ctx.get_parameter_source(name) is _COMMAND_LINE]
    if given:
        source = "--model" if model is not None else "--parameters"
        raise InvalidArgumentError(f"{', '.join(given)} cannot be combined with {source}; leave it out.")
    fusion = terms.FUSION_BYTES if fusion_threshold_mb is None else round(fusion_threshold_mb * 1024**2)
    shared = {name: wanted.pop(name) for name in ("batch", "optimizer", "fp16_allreduce")}
    own = {name: wanted[name] for name in (_OF_MODELS if model is not None else _OF_NUMBERS)}
    if model is not None:
        return _of_model(model, **shared, **own, fusion_bytes=fusion)
    return terms.of_numbers(**shared, **own, fusion_bytes=fusion), {}


def _notes_of_measuring(need: Need, said: dict[str, Any]) -> list[str]:
    found = []
    if not said.get("same_operations", True):
        found.append(
            "The model did other operations at the other batch size; the peak is a line through the two peaks."
        )
    measured = said.get("measured_peak")
    if measured and need.peak is not None:
        off = change_text(need.peak / measured - 1)
        found.append(f"Measured: PyTorch's allocator held {measured / 1e6:.4g} MB at most; the prediction is {off}.")
    return found


def _of_model(factory: str, *, fp16_allreduce: bool, fusion_bytes: int, **question: Any) -> tuple[Need, dict[str, Any]]:
    """The terms for ``MODULE:FACTORY`` or ``FILE.py:FACTORY``, and what the process said beside them.

    Args:
        factory: returns a model, (model, inputs) or (model, inputs, loss function of the output).
        fp16_allreduce, fusion_bytes: see ``terms.with_horovod``.
        question: ``batch``, samples on one rank; ``optimizer``, of ``terms.STATES``; ``framework``, of ``FRAMEWORKS``;
            ``input_shape``, of an input of float32 zeros, batch first, where the factory gives none, else None;
            ``device``: "cpu" runs small steps, "meta" computes shapes only, for models that do not fit here;
            ``measure``: also run real steps and take the allocator's peak ("measured_peak", bytes).
    Raises:
        InvalidArgumentError: the factory fails, or its model cannot be measured.
        DataError: the process ended without an answer.
    """
    said = ask("hvdkit.measure.memory.process", factory, **question)
    how = _how(said, question["optimizer"], question["device"], question["batch"])
    known = {name: said[name] for name in ("parameters", "gradients", "states", "activations", "peak")}
    return terms.with_horovod(Need(how=how, **known), said["gradient_size"], fp16_allreduce, fusion_bytes), said


def _how(said: dict[str, Any], optimizer: str, device: str, batch: int) -> dict[str, str]:
    if said["framework"] == "keras":
        return {
            "parameters": "the model's variables",
            "gradients": "the trainable variables",
            "states": f"as many numbers as {optimizer} keeps for each trainable one",
            "activations": f"the outputs of the layers for {batch} samples, an estimate",
        }
    first, second = said["batches"]
    return {
        "parameters": "parameters and buffers of the model",
        "gradients": "those that a backward produced",
        "states": f"those of {optimizer} after a step",
        "activations": f"what autograd kept for {first} and {second} samples on {device}, as a line to {batch}",
    }


def _page(need: Need, rows: Sequence[PerRank], notes: Sequence[str]) -> Page:
    """What a training needs on one rank, and on each of several."""
    least = need.activations is None
    lines = []
    for name in _TERMS:
        size = getattr(need, name)
        lines.append([name.replace("_", " "), None if size is None else bytes_text(size), need.how[name]])
    lines.insert(4, ["sum of these", bytes_text(need.total), "without the activations: the least" if least else ""])
    if need.peak is not None:
        lines.insert(5, ["peak of a step", bytes_text(need.peak), "with what operations need for a moment"])
    ranks = [[row.ranks, bytes_text(row.data_parallel), *map(bytes_text, row.zero.values())] for row in rows]
    columns = ["ranks", "data parallel", *(f"ZeRO {stage}" for stage in rows[0].zero)]
    names = ("term", "memory", "how")
    one = Table("Memory of a training on one rank", names, lines, left=("term", "how"))
    title = "On each rank, without its activations" if least else "On each rank"
    return Page([one, Table(title, columns, ranks)], notes)
