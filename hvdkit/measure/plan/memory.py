"""``hvdkit plan memory``: what a training needs on each rank, term by term, from numbers or from a live model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import click

from hvdkit.common.allreduce import FUSION_BYTES
from hvdkit.common.commands import large_count, number, numbers_of_ranks, whole_numbers
from hvdkit.common.json_files import Document
from hvdkit.common.table import Page, Table
from hvdkit.common.units import ITEM_SIZES, bytes_text, change_text, count_text, ranks_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model import ask

DTYPES = ("float8", "float16", "bfloat16", "float32", "float64")
STATES = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""Numbers that an optimizer keeps for each parameter; momentum is SGD with it."""
MARGIN = 1.2
"""An estimate may be so many times too low or too high: what docs/plan.md compares with lies within."""
_FULL_PRECISION = 4
_UNKNOWN = "not known; give --layers, --sequence and --hidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a training needs on one rank.

    Attributes:
        parameters, gradients, states: terms that every training has, bytes.
        activations: one more, bytes; None where they are not known.
        fusion_buffer, compression: what Horovod adds on several ranks, bytes.
        how: for each term, where the number comes from.
        peak: largest sum at any moment of a step, without Horovod's, bytes; None where only the terms are known.
    """

    parameters: int
    gradients: int
    states: int
    activations: int | None
    fusion_buffer: int = 0
    compression: int = 0
    how: dict[str, str]
    peak: int | None = None

    also: ClassVar[tuple[str, ...]] = ("total",)
    """Properties that JSON has, too."""

    @property
    def training(self) -> int:
        """The sum of what one process needs, or its peak where that is known."""
        return self.peak if self.peak is not None else self.total

    @property
    def total(self) -> int:
        """The sum of parameters, gradients, states and activations, where these are known."""
        return self.parameters + self.gradients + self.states + (self.activations or 0)


@dataclass(frozen=True, slots=True)
class PerRank:
    """Bytes on each of ``ranks`` ranks.

    Attributes:
        ranks: how many.
        data_parallel: plain data parallelism with Horovod: the whole on each rank, and Horovod's buffers on several.
        zero: by stage of ZeRO (1 is ``distribute(shard_state=True)``): optimizer states, then gradients, then
            parameters too are cut into ``ranks`` parts.
    """

    ranks: int
    data_parallel: int
    zero: dict[int, int]


class PlannedMemory(Document, frozen=True):
    """What a training needs; bytes.

    Attributes:
        need: of one rank.
        measured_peak: what PyTorch's allocator held at most; None where nothing was measured.
        ranks: by number of ranks.
        notes: what a reader should know, full sentences.
    """

    kind = "plan-memory"
    written_by = "hvdkit plan memory --json"

    need: Need
    measured_peak: int | None
    ranks: tuple[PerRank, ...]
    notes: tuple[str, ...]


def of_numbers(
    parameters: float,
    *,
    dtype: str = "float32",
    optimizer: str = "adam",
    mixed: bool = False,
    batch: int = 1,
    fp16_allreduce: bool = False,
    fusion_bytes: int = FUSION_BYTES,
    **transformer: Any,
) -> Need:
    """The terms for a model of which only numbers are known.

    Args:
        parameters: how many.
        dtype: of parameters, gradients, optimizer states and activations.
        optimizer: of ``STATES``.
        mixed: parameters and gradients of ``dtype``, but the optimizer keeps float32 states and a float32 copy of the
            parameters (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1: 16 bytes a parameter with Adam).
        batch: samples on one rank.
        fp16_allreduce: gradients are copied to half precision to travel.
        fusion_bytes: Horovod's buffer.
        transformer: what its activations follow from, see ``activations``.
    Raises:
        InvalidArgumentError: only some of what activations need.
    """
    count, size = round(parameters), ITEM_SIZES[dtype]
    weights = f"{count:.4g} x {size} bytes"
    kept = STATES[optimizer] + 1 if mixed else STATES[optimizer]
    state_size = _FULL_PRECISION if mixed else size
    copy = ", a float32 copy of the parameters among them" if mixed else ""
    kept_for_backward, activations_how = activations(size, batch, **transformer)
    how = {
        "parameters": weights,
        "gradients": weights,
        "states": f"{count:.4g} x {kept} x {state_size} bytes ({optimizer}{copy})",
        "activations": activations_how,
    }
    gradients = count * size
    need = Need(
        parameters=gradients,
        gradients=gradients,
        states=count * kept * state_size,
        activations=kept_for_backward,
        how=how,
    )
    return with_horovod(need, size, fp16_allreduce, fusion_bytes)


def with_horovod(need: Need, gradient_size: float, fp16_allreduce: bool, fusion_bytes: int) -> Need:
    """The same with what Horovod adds on several ranks; ``gradient_size``: bytes of one number of a gradient."""
    copies = fp16_allreduce and gradient_size > ITEM_SIZES["float16"]
    compression = round(need.gradients * ITEM_SIZES["float16"] / gradient_size) if copies else 0
    how = {
        **need.how,
        "fusion_buffer": "Horovod's, allocated whole; on several ranks",
        "compression": "copies of the gradients in half precision; on several ranks" if copies else "none",
    }
    return replace(need, fusion_buffer=fusion_bytes, compression=compression, how=how)


def per_rank(need: Need, ranks: int) -> PerRank:
    """What each of ``ranks`` ranks needs.

    ZeRO cuts its share of the terms into as many parts as there are ranks, rounded up; its own communication buffers
    are not in it.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5 (P_os, P_os+g, P_os+g+p).
    """
    horovod = need.fusion_buffer + need.compression if ranks > 1 else 0
    cut = {1: ("states",), 2: ("states", "gradients"), 3: ("states", "gradients", "parameters")}
    zero = {}
    for stage, names in cut.items():
        sizes = [getattr(need, name) for name in names]
        zero[stage] = need.training - sum(size - -(-size // ranks) for size in sizes)
    return PerRank(ranks, need.training + horovod, zero)


def activations(
    size: int,
    batch: int,
    *,
    layers: int | None = None,
    sequence: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocabulary: int | None = None,
    checkpointing: bool = False,
) -> tuple[int | None, str]:
    """Bytes that a transformer's backward needs, and in words how they were found.

    Args:
        size: bytes of a number.
        batch: samples on one rank.
        layers, sequence, hidden: without all three nothing is known: None. A layer keeps 34 s b h bytes in 16 bits
            (Korthikanti et al. 2022, arXiv:2205.05198, equation 1, without the matrices of attention, which fused
            kernels do not keep: Dao et al. 2022, arXiv:2205.14135).
        heads: attention heads of kernels that keep the matrices: 5 a s^2 b bytes more a layer, in 16 bits.
        vocabulary: words of a language model: its logits, and their gradient.
        checkpointing: a layer keeps its input only; one at a time is computed again.
    Raises:
        InvalidArgumentError: only some of what they need.
    """
    given = {"--layers": layers, "--sequence": sequence, "--hidden": hidden}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and heads is None and vocabulary is None and not checkpointing:
        return None, _UNKNOWN
    if layers is None or sequence is None or hidden is None:
        raise InvalidArgumentError(
            f"activations need --layers, --sequence and --hidden; missing: {', '.join(missing)}."
        )
    tokens = batch * sequence
    layer = tokens * (34 * hidden + 5 * (heads or 0) * sequence) * size // 2
    attention = "without the matrices of attention" if heads is None else "with the matrices of attention"
    if checkpointing:
        inputs = layers * tokens * hidden * size
        found = inputs + layer
        how = f"{layers} inputs of a layer, {bytes_text(inputs)}, and one layer {attention}, {bytes_text(layer)}"
    else:
        found, how = layers * layer, f"{layers} x {bytes_text(layer)} that a layer keeps, {attention}"
    if vocabulary is not None:
        logits = 2 * tokens * vocabulary * size
        found, how = found + logits, f"{how}; logits and their gradient, {bytes_text(logits)}"
    return found, how


def notes(need: Need, rows: Sequence[PerRank], capacity: int | None = None) -> tuple[list[str], bool]:
    """Full sentences: what follows for a reader; and whether the memory suffices, which is said only where it is sure.

    ``capacity``: bytes that one rank has; None when it was not said.
    """
    found = []
    if any(row.ranks > 1 for row in rows):
        found.append(
            "Plain data parallelism does not shrink any term: every rank keeps the whole model, and more ranks only "
            "train on more samples at once."
        )
    if capacity is None:
        return found, True
    suffices = need.activations is not None
    for row in rows:
        ranks = ranks_text(row.ranks)
        fits = [stage for stage, size in row.zero.items() if size <= (capacity if not suffices else capacity / MARGIN)]
        if row.data_parallel > (capacity * MARGIN if suffices else capacity):
            then = f"{_stage(fits[0])} would do" if fits else "no stage of ZeRO surely would, either"
            if fits and need.activations is None:
                then = f"{_stage(fits[0])} leaves {bytes_text(capacity - row.zero[fits[0]])} for its activations, "
                then += _UNKNOWN
            found.append(f"On {ranks} a rank needs more than it has with data parallelism; {then}.")
        elif need.activations is None:
            left = bytes_text(capacity - row.data_parallel)
            found.append(f"On {ranks} a rank has {left} left for its activations, {_UNKNOWN}.")
        elif row.data_parallel > capacity / MARGIN:
            found.append(
                f"On {ranks} a rank needs about {bytes_text(row.data_parallel)} of {bytes_text(capacity)}: too close "
                "to say whether it suffices, since the estimate may be 20% off; run a step on the device."
            )
    enough = suffices and all(row.data_parallel <= capacity / MARGIN for row in rows)
    return found, enough


def _stage(number: int) -> str:
    """A stage of ZeRO, and how hvdkit's user gets it."""
    return f"ZeRO stage {number}{' (distribute(shard_state=True))' if number == 1 else ''}"


_TERMS = ("parameters", "gradients", "states", "activations", "fusion_buffer", "compression")
_OF_TRANSFORMERS = ("layers", "sequence", "hidden", "heads", "vocabulary", "checkpointing")
_OF_NUMBERS: tuple[str, ...] = ("parameters", "dtype", "mixed", *_OF_TRANSFORMERS)
_OF_MODELS: tuple[str, ...] = ("model", "input_shape", "device", "measure")
_WHOLE = click.IntRange(min=1, max=10**9)
"""Beyond these, numbers are typing errors, and their products no numbers that a table can show."""


@click.command()
@click.option("--model", metavar="MODULE:FACTORY", help="Also FILE.py:FACTORY: a function that returns a model, "
              "(model, inputs) or (model, inputs, loss function of the output); PyTorch.")  # fmt: skip
@click.option("--parameters", callback=large_count, metavar="P", help="Number of parameters: 25557032, 1e12, 7B.")
@click.option("--batch", "--batch-size", "batch", type=_WHOLE, default=1, metavar="B", help="Samples on a rank.")
@click.option("--optimizer", type=click.Choice(list(STATES)), default="adam")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32",
              help="Data type of parameters, gradients and activations (with --parameters).")  # fmt: skip
@click.option("--mixed", is_flag=True, help="The optimizer keeps float32 states and a float32 copy of the parameters.")
@click.option("--layers", type=_WHOLE, metavar="L", help="Layers of a transformer; with --sequence and --hidden.")
@click.option("--sequence", type=_WHOLE, metavar="S", help="Tokens per sample.")
@click.option("--hidden", type=_WHOLE, metavar="H", help="Width of a layer.")
@click.option("--heads", type=_WHOLE, metavar="A",
              help="Attention heads, where attention keeps its matrices; fused kernels do not.")  # fmt: skip
@click.option("--vocabulary", type=_WHOLE, metavar="V", help="Words of a language model, for its logits.")
@click.option("--checkpointing", is_flag=True, help="Layers are computed again in backward (activation checkpointing).")
@click.option("--input-shape", callback=whole_numbers, metavar="B,...", help="Shape of an input of zeros, batch first.")
@click.option("--device", type=click.Choice(("cpu", "meta")), default="cpu",
              help="Device on which two steps of the model run; meta computes shapes only.")  # fmt: skip
@click.option("--measure", is_flag=True, help="Also run real steps with B samples here, and compare.")
@click.option("--fp16-allreduce", is_flag=True, help="Send gradients in half precision.")
@click.option("--fusion-threshold-mb", type=click.FloatRange(min=0), callback=number(0), metavar="MB",
              help="Horovod's fusion buffer, in MiB  [default: 128]")  # fmt: skip
@click.option("-n", "ranks", callback=numbers_of_ranks, default="1,8,64", metavar="N,...")
@click.option("--capacity-gb", type=click.FloatRange(min=0, min_open=True), callback=number(0, above=True),
              metavar="GB", help="Memory of one rank's device.")  # fmt: skip
@click.option("--json", "form", flag_value="json", help="Print JSON; sizes are bytes.")
@click.pass_context
def memory(
    ctx: click.Context,
    /,
    form: str | None,
    ranks: tuple[int, ...],
    capacity_gb: float | None,
    fusion_threshold_mb: float | None,
    **wanted: Any,
) -> int:
    """Estimate the memory of a training on each rank: parameters, gradients, optimizer, activations, buffers.

    For a real model, two steps with B samples are followed, which --device meta does without their memory; for plain
    numbers the terms are computed. Plain data parallelism needs all of it on every rank; the savings of ZeRO's stages
    are shown beside it.

    Exit status: 0; 1 when a rank needs more than --capacity-gb with data parallelism, or may need more: an estimate may
    be 20 % off, and says nothing without the activations.

    \b
    Examples:
      hvdkit plan memory --model nets.py:Net --input-shape 64,1,28,28 --batch 64 -n 1,8
      hvdkit plan memory --parameters 1e12 --dtype float16 --layers 120 --sequence 2048 --hidden 12288 --checkpointing
      hvdkit plan memory --parameters 7B --dtype bfloat16 --mixed --capacity-gb 80 -n 8,64
    """
    if (wanted["model"] is None) == (wanted["parameters"] is None):
        raise InvalidArgumentError("give either --model or --parameters, and not both.")
    own, foreign, source = _OF_NUMBERS, _OF_MODELS, "--parameters"
    if wanted["model"] is not None:
        own, foreign, source = _OF_MODELS, _OF_NUMBERS, "--model"
    given = [name for name in foreign if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidArgumentError(f"{words} cannot be combined with {source}; leave it out.")
    fusion = FUSION_BYTES if fusion_threshold_mb is None else round(fusion_threshold_mb * 1024**2)
    asked = {name: wanted[name] for name in ("batch", "optimizer", *own)}
    remarks, measured = [], None
    if wanted["model"] is None:
        need = of_numbers(**asked, fp16_allreduce=wanted["fp16_allreduce"], fusion_bytes=fusion)
    else:
        said = ask("hvdkit.measure.plan.live_model", **asked)
        how = {
            "parameters": "parameters and buffers of the model",
            "gradients": "those that a backward produced",
            "states": f"those of {wanted['optimizer']} after a step",
            "activations": f"what autograd kept for {count_text(wanted['batch'], 'sample')} on {wanted['device']}",
        }
        terms = {name: said[name] for name in ("parameters", "gradients", "states", "activations", "peak")}
        need = with_horovod(Need(how=how, **terms), said["gradient_size"], wanted["fp16_allreduce"], fusion)
        if measured := said.get("measured_peak"):
            off = change_text(said["peak"] / measured - 1)
            remarks.append(
                f"Measured: PyTorch's allocator held {measured / 1e6:.4g} MB at most; the prediction is {off}."
            )
    rows = [per_rank(need, n) for n in ranks]
    follows, suffices = notes(need, rows, None if capacity_gb is None else round(1e9 * capacity_gb))
    remarks += follows
    _page(need, rows, remarks).print(form, PlannedMemory(need, measured, tuple(rows), tuple(remarks)))
    return 0 if suffices else 1


def _page(need: Need, rows: Sequence[PerRank], remarks: Sequence[str]) -> Page:
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
    return Page([one, Table(title, columns, ranks)], remarks)
