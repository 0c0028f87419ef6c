"""Random streams, one that all ranks share while models are made and one of its own for each rank; and their states.

Every stream is a child of ``numpy.random.SeedSequence(seed)`` with a spawn key of its own, so that no two streams of a
job overlap, whatever the seeds are (O'Neill, "Developing a seed_seq Alternative", 2015; NumPy, "Parallel random number
generation"). The same seed, size and rank give the same numbers in every run.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdkit.errors import CheckpointError, whole
from hvdkit.steps.topology import Topology

_SHARED, _OWN = 0, 1


@dataclass(frozen=True, slots=True)
class Seeds:
    """The random streams of one process. Made by ``seed_everything``.

    Args:
        seed: of the whole job, an integer >= 0, the same on every rank.
        world: the job; ``rank`` is used.
    Raises:
        InvalidArgumentError: not an integer >= 0.
    """

    seed: int
    world: Topology

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", whole("seed", self.seed, 0))

    def shared(self) -> np.random.SeedSequence:
        """The stream that is the same on every rank: what models are initialised from."""
        return np.random.SeedSequence(self.seed, spawn_key=(_SHARED,))

    def own(self, *purpose: int) -> np.random.SeedSequence:
        """This rank's stream, or one of its branches.

        Args:
            purpose: numbers >= 0 that tell the branches apart; none: the stream itself.
        """
        return np.random.SeedSequence(self.seed, spawn_key=(_OWN, self.world.rank, *purpose))

    def generator(self, *purpose: int) -> np.random.Generator:
        """A NumPy generator on this rank's stream, for random numbers of your own.

        Args:
            purpose: see ``own``.
        """
        return np.random.default_rng(self.own(*purpose))


def integer(stream: np.random.SeedSequence, bits: int = 64) -> int:
    """A stream as the single integer that other libraries take as a seed.

    Args:
        bits: its length, at most 64.
    """
    return int(stream.generate_state(1, np.uint64)[0]) >> (64 - bits)


def seed_python(stream: np.random.SeedSequence) -> None:
    """Seed Python's ``random`` and NumPy's global generator."""
    random.seed(integer(stream))
    np.random.seed(stream.generate_state(8))


class Current:
    """What ``seed_everything`` of one framework binding began in this process.

    Attributes:
        seeds: the streams; None before.
    """

    def __init__(self) -> None:
        self.seeds: Seeds | None = None

    def seed(self) -> int | None:
        """What ``seed_everything`` was given, None without it."""
        return None if self.seeds is None else self.seeds.seed

    def facts(self) -> dict[str, float]:
        """What the ranks must have in common."""
        return {} if self.seeds is None else {"seed_everything's seed": float(self.seeds.seed)}


# In checkpoints: Python's and NumPy's global generators as plain bytes ------------------------------------------------

# Mersenne Twister, twice: version or position, the words, whether a normal number is left over, and that number.
_PYTHON, _NUMPY = struct.Struct("<i625I?d"), struct.Struct("<i624I?d")
STATE_BYTES = _PYTHON.size + _NUMPY.size
"""Length of what ``capture_state`` returns."""


def capture_state() -> npt.NDArray[np.uint8]:
    """The states as uint8 (STATE_BYTES,)."""
    version, words, left_over = random.getstate()
    python = _PYTHON.pack(version, *words, left_over is not None, left_over or 0.0)
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy = _NUMPY.pack(position, *keys.tolist(), bool(has_gauss), gauss)  # type: ignore[union-attr]
    return np.frombuffer(python + numpy, dtype=np.uint8).copy()


def restore_state(state: npt.NDArray[np.uint8]) -> None:
    """Go on from what ``capture_state`` returned.

    Raises:
        CheckpointError: bytes that no generator can be in.
    """
    try:
        contents = state.tobytes()
        version, *words, has_normal, normal = _PYTHON.unpack_from(contents)
        position, *keys, has_gauss, gauss = _NUMPY.unpack_from(contents, _PYTHON.size)
        random.setstate((version, tuple(words), normal if has_normal else None))
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), gauss))
    except (struct.error, ValueError, TypeError) as error:
        raise CheckpointError(f"the saved states of the random generators cannot be read: {error}") from error
