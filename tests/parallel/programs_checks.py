"""What ranks of several frameworks disagree in, and what they say of it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdkit.errors import HvdkitError


def signs(rank: int) -> dict[str, np.ndarray]:
    """Values by type, of which ranks 0 and 1 differ in two top bits of eight bytes, and nowhere else."""
    values = {"float64": [1, -1], "float32": [1, 1, 1, -1]}
    return {kind: np.roll(np.array(one, dtype=kind), rank * len(one) // 2) for kind, one in values.items()}


def message(attempt: Callable[[], Any]) -> str:
    """The error of an attempt, "" where there was none."""
    try:
        attempt()
    except HvdkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""
