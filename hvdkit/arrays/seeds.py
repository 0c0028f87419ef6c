"""Random numbers of each rank's own, and a stream that all share; the inside of ``hvdkit.arrays``."""

from __future__ import annotations

from hvdkit.steps.seeds import Current, Seeds, seed_python
from hvdkit.steps.topology import Topology

_RESUMED = 2  # branch of a rank's stream: trainings resumed on another number of ranks
CURRENT = Current()


def seed_everything(seed: int, world: Topology) -> Seeds:
    """Seed Python's ``random`` and NumPy's global generator with this rank's own stream, so that a run can be repeated.

    Frameworks of arrays draw from keys or generators that you make. Make them from the streams that are returned:
    ``numpy.random.default_rng(seeds.shared())`` for the first weights, the same on every rank; ``seeds.generator()``
    for dropout and augmentation, other numbers on each. The order of the samples is decided by ``shard(seed=)`` alone.

    Args:
        seed: of the job, >= 0, the same on every rank (``check_agreement`` compares it).
        world: the job; ``rank`` is used.
    Returns:
        The streams.
    Raises:
        InvalidArgumentError: a seed that is not an integer >= 0.
    Source: numpy.random.SeedSequence, one spawn key for each stream, so that they are independent for any seed.
    """
    seeds = Seeds(seed, world)
    seed_python(seeds.own())
    CURRENT.seeds = seeds
    return seeds


def branch(step: int) -> None:
    """Draw other numbers than the training drew that was saved at ``step`` on another number of ranks."""
    if CURRENT.seeds is not None:
        seed_python(CURRENT.seeds.own(_RESUMED, step))
