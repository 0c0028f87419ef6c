"""Step 4: how gradients are combined, validated before a framework sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdkit.errors import InvalidArgumentError

OPS = ("average", "sum", "adasum")
COMPRESSIONS = ("none", "fp16")


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """How the ranks' gradients become one (step 4).

    Attributes:
        op: "average" (the mean over ranks), "sum", or "adasum".
        compression: "none", or "fp16": gradients travel in half precision.
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
        passes = self.backward_passes_per_step
        if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
            raise InvalidArgumentError(f"backward_passes_per_step must be an integer >= 1, got {passes!r}.")
        factor = self.gradient_predivide_factor
        if not (isinstance(factor, (int, float)) and math.isfinite(factor) and factor > 0):
            raise InvalidArgumentError(f"gradient_predivide_factor must be a finite number > 0, got {factor!r}.")
        if factor != 1.0 and self.op != "average":
            raise InvalidArgumentError(
                f"gradient_predivide_factor={factor} splits an average, but op is {self.op!r}; "
                "use op='average' or leave it at 1."
            )
