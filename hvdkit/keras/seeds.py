"""Random numbers on every rank: the same while the model is made, each rank's own from then on; their states."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.errors import CheckpointError
from hvdkit.keras import private
from hvdkit.steps.seeds import STATE_BYTES, Current, Seeds, capture_state, integer, restore_state, seed_python
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.keras_layers import (
    generator_states,
    keras_generator,
    move_generators,
    seed_keras,
    state_numbers,
)

_LAYERS, _RESUMED = 2, 3  # branches of a rank's stream: for dropout and the like, and for a resumed run
CURRENT = Current()
States = npt.NDArray[np.int64]
_shared: list[bool] = []  # whether Keras still draws from the stream of all ranks
_moved: WeakSet[Any] = WeakSet()  # models whose layers draw this rank's own numbers


def seed_everything(seed: int, world: Topology) -> Seeds:
    """Seed Python's ``random``, NumPy, Keras and its backend, so that a run can be repeated; before the model is made.

    What Keras draws from (Python's ``random`` and the backend's generator) starts on a stream that is the same on every
    rank, so that all initialise the model alike. ``broadcast_state`` or ``BroadcastState`` (step 5) moves it, and the
    generators of the model's layers, to the rank's own: from then on dropout and augmentation differ between ranks.
    NumPy's global generator is on the rank's own stream at once. The order of the samples is decided by
    ``shard(seed=)`` alone.

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
    seed_keras(integer(seeds.shared(), bits=32))
    np.random.seed(seeds.own().generate_state(8))
    CURRENT.seeds, _shared[:] = seeds, [True]
    _moved.clear()
    return seeds


def move_to_own_stream(model: Any) -> None:
    """From now on Keras and the model's layers draw this rank's own numbers; nothing without ``seed_everything``."""
    seeds = CURRENT.seeds
    if seeds is None:
        return
    if _shared[0]:
        seed_keras(integer(seeds.own(), bits=32))
        _shared[:] = [False]
    if model not in _moved:
        _moved.add(model)
        move_generators(generator_states([model]), seeds, _LAYERS)


def branch(model: Any, step: int) -> None:
    """Draw other numbers than the training drew that was saved at ``step`` on another number of ranks."""
    seeds = CURRENT.seeds
    if seeds is not None:
        own = seeds.own(_RESUMED, step)
        seed_keras(integer(own, bits=32))
        seed_python(own)
        move_generators(generator_states([model]), seeds, _RESUMED, step)


# The states of everything that a training on this rank draws random numbers from, for checkpoints --------------------


def capture(model: Any) -> States:
    """Python's, NumPy's, the backend's and Keras' global generators, and those of the model's layers, int64 (length,).

    TensorFlow's operations with a seed of their own (``tf.random.uniform(seed=)``) count inside; that is not readable.
    """
    layers = [state_numbers(state) for state in generator_states([model])]
    keras_own = keras_generator()
    parts = [
        _words(capture_state()),
        np.array(layers, dtype=np.int64).reshape(-1),
        np.array([] if keras_own is None else state_numbers(keras_own.state), dtype=np.int64),
        _words(private.backend_state()),
    ]
    return np.concatenate([np.array([len(part) for part in parts], dtype=np.int64), *parts])


def restore(model: Any, states: States) -> None:
    """Go on from what ``capture`` returned.

    Raises:
        CheckpointError: it belongs to another model, or to another kind of process.
    """
    general, layers, keras_own, backend = np.split(states[4:], np.cumsum(states[:3]))
    generators = generator_states([model])
    if len(layers) != 2 * len(generators):
        raise CheckpointError(
            f"the checkpoint has {len(layers) // 2} random generators of layers, this model has {len(generators)}; "
            "restore into the model that was saved."
        )
    if len(keras_own):
        generators.append((keras_generator() or keras_generator(make=True)).state)
    for generator, numbers in zip(generators, [*layers.reshape(-1, 2), *keras_own.reshape(-1, 2)], strict=True):
        generator.assign(numbers.astype(keras.backend.standardize_dtype(generator.dtype)))
    private.set_backend_state(backend.view(np.uint8))
    restore_state(general.view(np.uint8)[:STATE_BYTES])


def _words(contents: npt.NDArray[np.uint8]) -> States:
    return np.pad(contents, (0, -len(contents) % 8)).view(np.int64)
