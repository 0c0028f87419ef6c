"""Random numbers on every rank: the same while the model is made, each rank's own from then on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.errors import AgreementError
from hvdkit.steps.seeds import Current, Seeds, integer, seed_python
from hvdkit.steps.topology import Topology

# Branches of a stream: TensorFlow's global generator, the layers' own generators, trainings resumed on other ranks.
_GENERATOR, _LAYERS, _RESUMED = 1, 2, 3
CURRENT = Current()
_shared: list[bool] = []  # whether TensorFlow still draws from the stream of all ranks
_expected: list[int] = []  # TensorFlow's global seed while nobody else has seeded
_own_layers: set[int] = set()  # seeds that were given to layers here


def seed_everything(seed: int, world: Topology) -> Seeds:
    """Seed Python's ``random``, NumPy, TensorFlow and Keras, so that a run can be repeated.

    Call it after ``pin_device`` and before the model is made. What Keras and TensorFlow draw from (Python's ``random``,
    the global seed and the global generator) starts on a stream that is the same on every rank, so that all initialise
    the model alike. ``broadcast_state`` (step 5) moves it, and the generators of the model's layers, to the rank's own:
    from then on dropout and augmentation differ between ranks. NumPy's global generator is on the rank's own stream at
    once. The order of the samples is decided by ``shard(seed=)`` alone.

    A ``tf.function`` keeps the seeds of ``tf.random`` operations from the time of its first call: call it first after
    ``broadcast_state``.

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
    CURRENT.seeds, _shared[:] = seeds, [True]
    _own_layers.clear()
    _seed_tensorflow(integer(seeds.shared(), bits=31), integer(seeds.shared().spawn(1)[0]))
    np.random.seed(seeds.own().generate_state(8))
    return seeds


def _seed_tensorflow(seed: int, generator: int) -> None:
    import keras  # loads with the first model anyway; without one nothing else here needs it

    numpys = np.random.get_state()
    keras.utils.set_random_seed(seed)
    np.random.set_state(numpys)
    tf.random.get_global_generator().reset_from_seed(generator)
    _expected[:] = [_global_seed()]


def _global_seed() -> int:
    return int(tf.compat.v1.random.get_seed(0)[0])  # asked with a seed, it draws none


def move_to_own_stream(states: Iterable[Any]) -> None:
    """From now on TensorFlow and a model's layers draw this rank's own numbers; nothing without ``seed_everything``.

    Args:
        states: int (2,) each, (seed, numbers drawn): of the generators in the model's layers.
    """
    seeds = CURRENT.seeds
    if seeds is None:
        return
    if _shared[0]:
        _shared[:] = [False]
        _seed_tensorflow(integer(seeds.own(), bits=31), integer(seeds.own(_GENERATOR)))
    # A layer that was moved before, as when a checkpoint is restored, stays.
    _move_layers(seeds, [state for state in states if _seed_of(state) not in _own_layers], _LAYERS)


def _move_layers(seeds: Seeds, states: Iterable[Any], *purpose: int) -> None:
    for state in states:
        seed, drawn = np.asarray(state).tolist()
        own = integer(seeds.own(*purpose, seed % 2**32), bits=31)
        _own_layers.add(own)
        state.assign(np.array([own, drawn], dtype=np.int64))


def _seed_of(state: Any) -> int:
    return int(np.asarray(state)[0])


def branch(states: Iterable[Any], step: int) -> None:
    """Draw other numbers than the training drew that was saved at ``step`` on another number of ranks.

    Args:
        states: see ``move_to_own_stream``.
    """
    seeds = CURRENT.seeds
    if seeds is not None:
        own = seeds.own(_RESUMED, step)
        _seed_tensorflow(integer(own, bits=31), integer(seeds.own(_RESUMED, step, _GENERATOR)))
        seed_python(own)
        _move_layers(seeds, states, _RESUMED, step, _LAYERS)


def accept(states: Iterable[Any]) -> None:
    """The layers' generators were put where a checkpoint had them: they are not to be moved again."""
    _own_layers.update(map(_seed_of, states))


def facts() -> dict[str, float]:
    """What the ranks must have in common."""
    common = CURRENT.facts()
    return {**common, "TensorFlow seeded anew": float(_seeded_anew())} if common else {}


def _seeded_anew() -> bool:
    return CURRENT.seeds is not None and _global_seed() != _expected[0]


def require_own_stream() -> None:
    """Raise AgreementError where TensorFlow was seeded anew since ``seed_everything``: ranks may draw alike."""
    if _seeded_anew():
        raise AgreementError(
            f"TensorFlow was seeded with {_global_seed()} after seed_everything, so that ranks may draw the same "
            "random numbers; leave tf.random.set_seed and keras.utils.set_random_seed out, or call seed_everything "
            "after them."
        )
