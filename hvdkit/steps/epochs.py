"""Step 8: the number of steps in an epoch, the same on every rank."""

from __future__ import annotations

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.numbers import whole
from hvdkit.steps.topology import Topology

REMAINDERS = ("drop", "pad", "exact")


def steps_per_epoch(n_samples: int, batch_size: int, world: Topology, remainder: str = "drop") -> int:
    """Steps (global batches) in one epoch (step 8); equal on every rank, whatever the remainder.

    Args:
        n_samples: samples in the whole data set, before sharding, >= 1.
        batch_size: samples per step on one rank, >= 1.
        world: the job; only ``size`` is used.
        remainder: "drop" leaves the last partial batch of the epoch out, "pad" and "exact" take one more step for it.
    Returns:
        floor(n_samples / (batch_size * size)) for "drop", else the ceiling.
    Raises:
        InvalidArgumentError: a number that is not a positive integer, an unknown policy, or "drop" with fewer
            samples than one global batch (no step would be left).
    """
    n_samples, batch_size = whole("n_samples", n_samples, 1), whole("batch_size", batch_size, 1)
    if remainder not in REMAINDERS:
        raise InvalidArgumentError(f"remainder must be one of {', '.join(REMAINDERS)}, got {remainder!r}.")
    global_batch = batch_size * world.size
    if remainder != "drop":
        return -(-n_samples // global_batch)
    if n_samples < global_batch:
        raise InvalidArgumentError(
            f"{n_samples} samples are fewer than one global batch of {batch_size} x {world.size} ranks, so "
            "remainder='drop' leaves no step; use a smaller batch_size or remainder='exact'."
        )
    return n_samples // global_batch
