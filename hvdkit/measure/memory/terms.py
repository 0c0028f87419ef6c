"""The terms of a training's memory, from numbers; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hvdkit.common.json_files import Document
from hvdkit.common.units import ITEM_SIZES, bytes_text, ranks_text
from hvdkit.errors import InvalidArgumentError

DTYPES = ("float8", "float16", "bfloat16", "float32", "float64")
STATES = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""Numbers that an optimizer keeps for each parameter; momentum is SGD with it."""
FUSION_BYTES = 128 * 1024**2
"""HOROVOD_FUSION_THRESHOLD of Horovod 0.28.1, which is also the size of its buffer."""
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
        zero: by stage of ZeRO: optimizer states, then gradients, then parameters too are cut into ``ranks`` parts.
    """

    ranks: int
    data_parallel: int
    zero: dict[int, int]


class Memory(Document, frozen=True):
    """What a training needs; bytes.

    Attributes:
        need: of one rank.
        measured_peak: what PyTorch's allocator held at most; None where nothing was measured.
        ranks: by number of ranks.
        notes: what a reader should know, full sentences.
    """

    kind = "memory"
    written_by = "hvdkit memory --json"

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
    layers: int | None = None,
    sequence: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    fp16_allreduce: bool = False,
    fusion_bytes: int = FUSION_BYTES,
) -> Need:
    """The terms for a model of which only numbers are known.

    Args:
        parameters: how many.
        dtype: of parameters, gradients, optimizer states and activations.
        optimizer: of ``STATES``.
        mixed: parameters and gradients of ``dtype``, but the optimizer keeps float32 states and a float32 copy of the
            parameters (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1: 16 bytes a parameter with Adam).
        batch: samples on one rank.
        layers, sequence, hidden: of a transformer; without all three there are no activations in the answer. One
            hidden state of (batch, sequence, hidden) per layer is counted, the least that can be kept.
        heads: attention heads; with them all that a layer without recomputation keeps is counted, 34 s b h + 5 a s^2 b
            bytes in 16 bits (Korthikanti et al. 2022, arXiv:2205.05198, equation 1).
        fp16_allreduce: gradients are copied to half precision to travel.
        fusion_bytes: Horovod's buffer.
    Raises:
        InvalidArgumentError: only some of layers, sequence, hidden.
    """
    count, size = round(parameters), ITEM_SIZES[dtype]
    weights = f"{count:.4g} x {size} bytes"
    kept = STATES[optimizer] + 1 if mixed else STATES[optimizer]
    state_size = _FULL_PRECISION if mixed else size
    copy = ", a float32 copy of the parameters among them" if mixed else ""
    activations, activations_how = _activations(size, batch, layers, sequence, hidden, heads)
    how = {
        "parameters": weights,
        "gradients": weights,
        "states": f"{count:.4g} x {kept} x {state_size} bytes ({optimizer}{copy})",
        "activations": activations_how,
    }
    gradients = count * size
    need = Need(
        parameters=gradients, gradients=gradients, states=count * kept * state_size, activations=activations, how=how
    )
    return with_horovod(need, size, fp16_allreduce, fusion_bytes)


def with_horovod(need: Need, gradient_size: float, fp16_allreduce: bool, fusion_bytes: int) -> Need:
    """The same with what Horovod adds on several ranks.

    Args:
        gradient_size: bytes of one number of a gradient.
        fp16_allreduce: gradients wider than that are copied to half precision.
        fusion_bytes: of the buffer; it is allocated whole.
    """
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


def notes(need: Need, rows: Sequence[PerRank], capacity: int | None = None) -> list[str]:
    """Full sentences: what follows for a reader. Nothing suffices where the activations are not known.

    Args:
        need, rows: of one rank, and by number of ranks.
        capacity: bytes that one rank has; None when it was not said.
    """
    several = [row for row in rows if row.ranks > 1]
    found = []
    if several:
        found.append(
            "Plain data parallelism does not shrink any term: every rank keeps the whole model, and more ranks only "
            "train on more samples at once."
        )
    if capacity is None:
        return found
    unknown = need.activations is None
    for row in rows:
        ranks = ranks_text(row.ranks)
        if unknown and row.data_parallel <= capacity:
            left = bytes_text(capacity - row.data_parallel)
            found.append(f"On {ranks} a rank has {left} left for its activations, {_UNKNOWN}.")
        if row.data_parallel > capacity:
            fits = [str(stage) for stage, size in row.zero.items() if size <= capacity]
            then = f"ZeRO stage {fits[0]} would" if fits else "no stage of ZeRO would, either"
            if fits and unknown:
                left = bytes_text(capacity - row.zero[int(fits[0])])
                then = f"ZeRO stage {fits[0]} leaves {left} for its activations, {_UNKNOWN}"
            found.append(f"On {ranks} a rank needs more than it has with data parallelism; {then}.")
    return found


def _activations(
    size: int, batch: int, layers: int | None, sequence: int | None, hidden: int | None, heads: int | None
) -> tuple[int | None, str]:
    given = {"--layers": layers, "--sequence": sequence, "--hidden": hidden}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and heads is None:
        return None, _UNKNOWN
    if layers is None or sequence is None or hidden is None:
        raise InvalidArgumentError(
            f"activations need --layers, --sequence and --hidden; missing: {', '.join(missing)}."
        )
    if heads is None:
        how = f"{batch} x {layers} x {sequence} x {hidden} x {size} bytes: one hidden state a layer, the least"
        return batch * layers * sequence * hidden * size, how
    in_16_bits = layers * sequence * batch * (34 * hidden + 5 * heads * sequence)
    return in_16_bits * size // 2, f"{layers} x (34 s b h + 5 a s^2 b) x {size}/2 bytes: all that a layer keeps"
