"""Step 4: how gradients are combined, validated before a framework sees them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import InvalidArgumentError, whole

OPS = ("average", "sum", "adasum")
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "auto")
BFLOAT16_RANKS = 64
"""Over more ranks bfloat16 is summed as float32: it does not see one number beside the sum of 2^8 such."""
CLIPPED = "_hvdkit_clipped"
"""Attribute of a gradient that was clipped, and of the functions that mark what they clip."""


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """How the ranks' gradients become one (step 4).

    Attributes:
        op: "average" (the mean over ranks), "sum", or "adasum".
        compression: how float32 and float64 gradients travel. "none": as they are. "fp16": in half precision, infinite
            beyond 65504. "bf16": in 2 bytes with the range of float32. "int8": in 1 byte, see
            ``hvdkit.core.compression``. "auto": as "none", "bf16" or "int8", see there. Not with "adasum",
            but for "fp16".
        backward_passes_per_step: backward passes whose gradients are added locally before one allreduce, >= 1.
        gradient_predivide_factor: f > 0 splits the averaging: gradients are divided by f before and by size/f after
            the sum; only with op="average".
    Raises:
        InvalidArgumentError: an unknown name, a number out of range, or options that exclude each other.
    Source: Horovod 0.28.1, horovod/torch/optimizer.py; Adasum: Maleki et al. 2020, arXiv:2006.02924.
    """

    op: str = "average"
    compression: str = "none"
    backward_passes_per_step: int = 1
    gradient_predivide_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise InvalidArgumentError(f"op must be one of {', '.join(OPS)}, got {self.op!r}.")
        if self.compression not in COMPRESSIONS:
            raise InvalidArgumentError(
                f"compression must be one of {', '.join(COMPRESSIONS)}, got {self.compression!r}."
            )
        passes = whole("backward_passes_per_step", self.backward_passes_per_step, 1)
        object.__setattr__(self, "backward_passes_per_step", passes)
        if self.op == "adasum" and self.compression in ("bf16", "int8", "auto"):
            raise InvalidArgumentError(
                f"compression={self.compression!r} averages, and op='adasum' does not; use op='average', or "
                "compression='fp16'."
            )
        factor = self.gradient_predivide_factor
        if not (isinstance(factor, (int, float)) and math.isfinite(factor) and factor > 0):
            raise InvalidArgumentError(f"gradient_predivide_factor must be a finite number > 0, got {factor!r}.")
        if factor != 1.0 and self.op != "average":
            raise InvalidArgumentError(
                f"gradient_predivide_factor={factor} splits an average, but op is {self.op!r}; "
                "use op='average' or leave it at 1."
            )

    def require_possible(self, ranks: int, *, all_ranks: bool, over_mpi: bool, adds_bfloat16: bool = True) -> None:
        """Refuse Adasum and bfloat16 where Horovod cannot add them up; every rank is told alike.

        Args:
            ranks: of the process set.
            all_ranks: whether these are all ranks of the job.
            over_mpi: whether the job communicates over MPI.
            adds_bfloat16: whether Horovod adds up bfloat16 over so many ranks.
        Raises:
            InvalidArgumentError: one of these is not as the options need it.
        """
        if self.compression == "bf16" and not adds_bfloat16:
            raise InvalidArgumentError(
                f"compression='bf16' needs a Horovod that adds up bfloat16, over at most {BFLOAT16_RANKS} ranks, and "
                f"this one has {ranks}; run `hvdkit install` (without --plain), or use compression='int8' or 'fp16'."
            )
        if self.op != "adasum":
            return
        if not over_mpi:
            raise InvalidArgumentError("op='adasum' needs MPI, and this job communicates over Gloo; use op='average'.")
        if not all_ranks or ranks & (ranks - 1):
            raise InvalidArgumentError(
                f"op='adasum' needs all ranks and a power of two of them, got {ranks}; use op='average'."
            )


def obstacle_of_type(dtype: str) -> str | None:
    """Why gradients of a floating-point type cannot be averaged, and what to do; None if they can."""
    if not dtype.startswith(("float8", "float4")):
        return None
    return (
        f"it is {dtype}, in which a mean over ranks has 3 bits or fewer; keep parameters in bfloat16 or float32, and "
        "compute with a copy of them in 8 bits."
    )


def refuse_clipped(
    gradients: Sequence[Any],
    also: str = "",
    is_clipped: Callable[[Any], Any] = lambda gradient: getattr(gradient, CLIPPED, False),
) -> None:
    """Raise InvalidArgumentError where a rank has clipped gradients, by what it has, before they are averaged.

    Args:
        gradients: those that are about to be averaged.
        also: another way to clip, for the message.
        is_clipped: tells of one; default: by its attribute ``CLIPPED``.
    """
    for number, gradient in enumerate(gradients, 1):
        if is_clipped(gradient):
            shape = tuple(gradient.shape) if isinstance(gradient.shape, tuple) else gradient.shape
            raise InvalidArgumentError(
                f"gradient {number} of {len(gradients)}, of shape {shape}, was clipped before it is averaged, by what "
                "this rank has; one process clips that of all samples. Give the optimizer global_clipnorm=, clipnorm= "
                f"or clipvalue={also} instead."
            )
