"""What ``exchange`` looks at to see whether the ranks train apart."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch


def facts_of(parameters: Iterable[torch.Tensor]) -> npt.NDArray[np.float64]:
    """What shows whether two ranks' parameters differ, float64 (n, 2): of each its norm, and a sum of that size."""
    facts = []
    for one in parameters:
        flat = (torch.view_as_real(one.detach()) if one.is_complex() else one.detach()).reshape(-1)
        flat = flat if flat.element_size() > 1 else flat.float()
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
        facts.append(torch.stack([norm, flat.sum(dtype=torch.float64) / max(len(flat), 1) ** 0.5]))
    return np.array([one.tolist() for one in facts]).reshape(-1, 2)


def rounding_of(parameter: torch.Tensor) -> float:
    """The machine epsilon of its type; 1 where that has 8 bits."""
    return 1.0 if parameter.element_size() == 1 else torch.finfo(parameter.dtype).eps


def warn_of_clipped(gradients: list[torch.Tensor]) -> None:
    """Of gradients that no backward has averaged, all changed in place: clipping does that, and assigning does not."""
    if gradients and all(one._version for one in gradients):
        warnings.warn(
            "step() averages gradients that came from no backward(); what has changed them in place since, such as "
            "clip_grad_norm_, saw this rank's own: before it, give .grad the mean over ranks by hvd.allreduce.",
            stacklevel=5,
        )
