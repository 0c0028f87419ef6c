"""The states of everything that a TensorFlow training on this rank draws random numbers from, for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.errors import CheckpointError
from hvdkit.steps.seeds import STATE_BYTES, capture_state, restore_state
from hvdkit.tensorflow import private, seeds

States = npt.NDArray[np.int64]
_WORDS = 626  # of a Mersenne Twister as ``random.Random`` states it: version, 624 words, position
_GENERATOR = 4  # whether there is one, and its three words


def capture(layers: Sequence[Any]) -> States:
    """The states, int64 (length,): Python's, NumPy's, TensorFlow's and Keras' global generators, and the layers'.

    ``tf.random`` operations in a ``tf.function`` count inside their kernels, which cannot be read: after a resume they
    begin anew. (Keras layers, ``keras.random`` and ``tf.random.Generator`` are complete.)

    Args:
        layers: the states of the generators in the model's layers, see ``tensorflow_state.generator_states``.
    """
    contents = capture_state()
    parts = [
        np.pad(contents, (0, -len(contents) % 8)).view(np.int64),
        _eager_seeds(),
        _padded(private.global_generator()),
        _padded(private.keras_generator()),
        *(np.asarray(state).astype(np.int64) for state in layers),
    ]
    return np.concatenate(parts)


def restore(states: States, layers: Sequence[Any]) -> None:
    """Go on from what ``capture`` returned.

    Raises:
        CheckpointError: it belongs to another model, or no generator can be in such a state.
    """
    general = -(-STATE_BYTES // 8)
    lengths = [general, _WORDS, _GENERATOR, _GENERATOR, *[2] * len(layers)]
    if len(states) != sum(lengths):
        raise CheckpointError(
            f"the checkpoint holds {len(states)} words of random states, this model needs {sum(lengths)}; restore into "
            "the model that was saved."
        )
    python, eager, tensorflows, kerases, *own = np.split(states, np.cumsum(lengths)[:-1])
    if tensorflows[0]:
        tf.random.get_global_generator().state.assign(tensorflows[1:])
    if kerases[0]:
        private.keras_generator(make=True).state.assign(kerases[1:3])
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
    seeds.accept(layers)


def _eager_seeds() -> States:
    """What gives the eager ``tf.random`` operations their seeds; zeros until a seed is set."""
    state = private.eager_seeds()
    if state is None:
        return np.zeros(_WORDS, dtype=np.int64)
    version, words, _ = state
    return np.array([version, *words], dtype=np.int64)


def _padded(generator: Any) -> States:
    words = [] if generator is None else [1, *np.asarray(generator.state).astype(np.int64)[: _GENERATOR - 1].tolist()]
    return np.array([*words, *[0] * (_GENERATOR - len(words))], dtype=np.int64)
