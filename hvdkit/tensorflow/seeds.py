"""Random numbers on every rank: the same while the model is made, each rank's own from then on; their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.errors import AgreementError, CheckpointError
from hvdkit.steps.seeds import STATE_BYTES, Current, Seeds, capture_state, integer, restore_state, seed_python
from hvdkit.steps.topology import Topology
from hvdkit.tensorflow import private
from hvdkit.tf_shared.keras_layers import keras_generator, move_generators, seed_keras, state_numbers

# Branches of a stream: TensorFlow's global generator, the layers' own generators, trainings resumed on other ranks.
_GENERATOR, _LAYERS, _RESUMED = 1, 2, 3
CURRENT = Current()
States = npt.NDArray[np.int64]
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
    seed_keras(seed)
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
    others = [state for state in states if state_numbers(state)[0] not in _own_layers]
    _own_layers.update(move_generators(others, seeds, _LAYERS))


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
        _own_layers.update(move_generators(states, seeds, _RESUMED, step, _LAYERS))


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


# The states of everything that a training on this rank draws random numbers from, for checkpoints --------------------

_WORDS = 626  # of a Mersenne Twister as ``random.Random`` states it: version, 624 words, position
_PADDED = 4  # of a global generator: whether there is one, and its three words


def capture(layers: Sequence[Any]) -> States:
    """The states, int64 (length,): Python's, NumPy's, TensorFlow's and Keras' global generators, and the layers'.

    ``tf.random`` operations in a ``tf.function`` count inside their kernels, which cannot be read: after a resume they
    begin anew. (Keras layers, ``keras.random`` and ``tf.random.Generator`` are complete.)

    Args:
        layers: the states of the generators in the model's layers, see ``keras_layers.generator_states``.
    """
    contents = capture_state()
    seeds = private.eager_seeds()  # what gives the eager ``tf.random`` operations theirs
    parts = [
        np.pad(contents, (0, -len(contents) % 8)).view(np.int64),
        np.zeros(_WORDS, dtype=np.int64) if seeds is None else np.array([seeds[0], *seeds[1]], dtype=np.int64),
        _padded(private.global_generator()),
        _padded(keras_generator()),
        *(np.array(state_numbers(state), dtype=np.int64) for state in layers),
    ]
    return np.concatenate(parts)


def restore(states: States, layers: Sequence[Any]) -> None:
    """Go on from what ``capture`` returned.

    Raises:
        CheckpointError: it belongs to another model, or no generator can be in such a state.
    """
    general = -(-STATE_BYTES // 8)
    lengths = [general, _WORDS, _PADDED, _PADDED, *[2] * len(layers)]
    if len(states) != sum(lengths):
        raise CheckpointError(
            f"the checkpoint holds {len(states)} words of random states, this model needs {sum(lengths)}; restore into "
            "the model that was saved."
        )
    python, eager, tensorflows, kerases, *own = np.split(states, np.cumsum(lengths)[:-1])
    if tensorflows[0]:
        tf.random.get_global_generator().state.assign(tensorflows[1:])
    if kerases[0]:
        keras_generator(make=True).state.assign(kerases[1:3])
    for state, numbers in zip(layers, own, strict=True):
        state.assign(numbers)
    # Last, since whoever made a generator above has drawn its seed from these.
    version, *words = eager.tolist()
    try:
        if version:
            private.set_eager_seeds((version, tuple(words), None))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the saved state of TensorFlow's seeds cannot be read: {error}") from error
    restore_state(python.view(np.uint8)[:STATE_BYTES])
    _own_layers.update(state_numbers(state)[0] for state in layers)  # they are not to be moved again


def _padded(generator: Any) -> States:
    words = [] if generator is None else [1, *np.asarray(generator.state).astype(np.int64)[: _PADDED - 1].tolist()]
    return np.array([*words, *[0] * (_PADDED - len(words))], dtype=np.int64)
