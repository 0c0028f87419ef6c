"""Random numbers on every rank: the same while the model is made, each rank's own from then on."""

from __future__ import annotations

import torch

from hvdkit.errors import AgreementError
from hvdkit.steps.seeds import Current, Seeds, integer, seed_python
from hvdkit.steps.topology import Topology

_LOADER, _RESUMED = 1, 2  # branches of a rank's stream: DataLoader workers, trainings resumed on other ranks
CURRENT = Current()
_expected: list[int] = []  # torch.initial_seed() while nobody else has seeded


def seed_everything(seed: int, world: Topology) -> Seeds:
    """Seed Python's ``random``, NumPy and PyTorch (all devices), so that a run can be repeated.

    PyTorch's generators start on a stream that is the same on every rank, so that all initialise the model alike, and
    ``broadcast_state`` (step 5) moves them to the rank's own: from then on dropout and augmentation differ between
    ranks. ``random`` and NumPy's global generator are on the rank's own stream at once, and the workers of ``shard``'s
    loader get seeds of the rank and the epoch. The order of the samples is decided by ``shard(seed=)`` alone.

    Args:
        seed: of the job, >= 0, the same on every rank (``check_agreement`` compares it).
        world: the job; ``rank`` is used.
    Returns:
        The streams; ``.generator()`` is a NumPy generator of this rank for random numbers of your own.
    Raises:
        InvalidArgumentError: a seed that is not an integer >= 0.
    Source: numpy.random.SeedSequence, one spawn key for each stream, so that they are independent for any seed.
    """
    seeds = Seeds(seed, world)
    seed_python(seeds.own())
    CURRENT.seeds = seeds
    _seed_torch(integer(seeds.shared()))
    return seeds


def _seed_torch(seed: int) -> None:
    torch.manual_seed(seed)
    _expected[:] = [torch.initial_seed()]


def move_to_own_stream() -> None:
    """From now on PyTorch draws this rank's own numbers; nothing happens without ``seed_everything``."""
    if CURRENT.seeds is not None and _expected[0] != integer(CURRENT.seeds.own()):
        _seed_torch(integer(CURRENT.seeds.own()))


def branch(step: int) -> None:
    """Draw other numbers than the training drew that was saved at ``step`` on another number of ranks."""
    if CURRENT.seeds is not None:
        own = CURRENT.seeds.own(_RESUMED, step)
        seed_python(own)
        _seed_torch(integer(own))


def accept() -> None:
    """PyTorch's generator was put where a checkpoint had it: that is no seeding behind our back."""
    _expected[:] = [torch.initial_seed()]


def workers_generator(epoch: int) -> torch.Generator | None:
    """What seeds the DataLoader workers of an epoch; None without ``seed_everything``."""
    if CURRENT.seeds is None:
        return None
    return torch.Generator().manual_seed(integer(CURRENT.seeds.own(_LOADER, epoch), bits=63))


def facts() -> dict[str, float]:
    """What the ranks must have in common."""
    common = CURRENT.facts()
    return {**common, "torch seeded anew": float(_seeded_anew())} if common else {}


def _seeded_anew() -> bool:
    return CURRENT.seeds is not None and torch.initial_seed() != _expected[0]


def require_own_stream() -> None:
    """Raise AgreementError where PyTorch was seeded anew since ``seed_everything``: ranks may draw the same numbers."""
    if _seeded_anew():
        raise AgreementError(
            f"PyTorch's generator was seeded with {torch.initial_seed()} after seed_everything, so that ranks may draw "
            "the same random numbers; leave torch.manual_seed out, or call seed_everything after it."
        )
