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
    _seed_keras(seeds.shared())
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
        _seed_keras(seeds.own())
        _shared[:] = [False]
    if model not in _moved:
        _moved.add(model)
        _move_layers(seeds, model, _LAYERS)


def _move_layers(seeds: Seeds, model: Any, *purpose: int) -> None:
    for state in generator_states(model):
        seed, drawn = np.asarray(keras.ops.convert_to_numpy(state)).tolist()
        own = integer(seeds.own(*purpose, seed % 2**32), bits=31)
        state.assign(np.array([own, drawn]).astype(keras.backend.standardize_dtype(state.dtype)))


def branch(model: Any, step: int) -> None:
    """Draw other numbers than the training drew that was saved at ``step`` on another number of ranks."""
    seeds = CURRENT.seeds
    if seeds is not None:
        own = seeds.own(_RESUMED, step)
        _seed_keras(own)
        seed_python(own)
        _move_layers(seeds, model, _RESUMED, step)


def _seed_keras(stream: np.random.SeedSequence) -> None:
    numpys = np.random.get_state()
    keras.utils.set_random_seed(integer(stream, bits=32))
    np.random.set_state(numpys)


def generator_states(model: Any) -> list[Any]:
    """The states (seed, numbers drawn) of the random generators in a model's layers, each once."""
    weights = {id(weight) for weight in model.weights}
    return list({id(one): one for one in model.variables if id(one) not in weights}.values())


# The states of everything that a training on this rank draws random numbers from, for checkpoints --------------------


def capture(model: Any) -> States:
    """Python's, NumPy's, the backend's and Keras' global generators, and those of the model's layers, int64 (length,).

    TensorFlow's operations with a seed of their own (``tf.random.uniform(seed=)``) count inside; that is not readable.
    """
    layers = [_numbers(state) for state in generator_states(model)]
    keras_own = private.keras_generator()
    parts = [
        _words(capture_state()),
        np.array(layers, dtype=np.int64).reshape(-1),
        np.array([] if keras_own is None else _numbers(keras_own.state), dtype=np.int64),
        _words(private.backend_state()),
    ]
    return np.concatenate([np.array([len(part) for part in parts], dtype=np.int64), *parts])


def restore(model: Any, states: States) -> None:
    """Go on from what ``capture`` returned.

    Raises:
        CheckpointError: it belongs to another model, or to another kind of process.
    """
    general, layers, keras_own, backend = np.split(states[4:], np.cumsum(states[:3]))
    generators = generator_states(model)
    if len(layers) != 2 * len(generators):
        raise CheckpointError(
            f"the checkpoint has {len(layers) // 2} random generators of layers, this model has {len(generators)}; "
            "restore into the model that was saved."
        )
    if len(keras_own):
        generators.append((private.keras_generator() or private.keras_generator(make=True)).state)
    for generator, numbers in zip(generators, [*layers.reshape(-1, 2), *keras_own.reshape(-1, 2)], strict=True):
        generator.assign(numbers.astype(keras.backend.standardize_dtype(generator.dtype)))
    private.set_backend_state(backend.view(np.uint8))
    restore_state(general.view(np.uint8)[:STATE_BYTES])


def _words(contents: npt.NDArray[np.uint8]) -> States:
    return np.pad(contents, (0, -len(contents) % 8)).view(np.int64)


def _numbers(state: Any) -> list[int]:
    return [int(number) for number in np.asarray(keras.ops.convert_to_numpy(state))]
