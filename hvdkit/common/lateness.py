"""Who keeps the others waiting, from how late each rank is in each step.

Why this room exists: a timeline, the traces of all ranks and the step times of all ranks know the same thing, and must
name the same rank.
"""

from __future__ import annotations

import numpy as np

from hvdkit.steps.stragglers import Floats, lower_median


def costs(own: Floats) -> Floats:
    """How long each rank keeps the others waiting, per step, in the unit of ``own``.

    A step waits for its last rank, which costs what it is behind the typical one (the lower median, of two ranks the
    faster): time is weighed, not how often a rank is last.

    Args:
        own: (ranks, steps), when a rank is ready, counted from any moment that all ranks share in a step.
    Returns:
        (ranks,), the mean over the steps.
    """
    last = own.argmax(axis=0)
    behind = own.max(axis=0) - lower_median(own)
    return np.asarray(np.bincount(last, behind, len(own)) / max(1, own.shape[1]), np.float64)
