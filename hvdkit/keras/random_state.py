"""The states of everything that a Keras training on this rank draws random numbers from, for checkpoints."""

from __future__ import annotations

import importlib
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.errors import CheckpointError
from hvdkit.keras import seeds
from hvdkit.steps import random_state

States = npt.NDArray[np.int64]


def capture(model: Any) -> States:
    """Python's, NumPy's, the backend's and Keras' global generators, and those of the model's layers, int64 (length,).

    TensorFlow's operations with a seed of their own (``tf.random.uniform(seed=)``) count inside; that is not readable.
    """
    layers = [_numbers(state) for state in seeds.generator_states(model)]
    keras_own = _keras_generator()
    parts = [
        _words(random_state.capture()),
        np.array(layers, dtype=np.int64).reshape(-1),
        np.array([] if keras_own is None else _numbers(keras_own.state), dtype=np.int64),
        _words(backend_state()),
    ]
    return np.concatenate([np.array([len(part) for part in parts], dtype=np.int64), *parts])


def restore(model: Any, states: States) -> None:
    """Go on from what ``capture`` returned.

    Raises:
        CheckpointError: it belongs to another model, or to another kind of process.
    """
    general, layers, keras_own, backend = np.split(states[4:], np.cumsum(states[:3]))
    generators = seeds.generator_states(model)
    if len(layers) != 2 * len(generators):
        raise CheckpointError(
            f"the checkpoint has {len(layers) // 2} random generators of layers, this model has {len(generators)}; "
            "restore into the model that was saved."
        )
    if len(keras_own):
        if _keras_generator() is None:
            _seed_generators().global_seed_generator()
        generators.append(_keras_generator().state)
    for generator, numbers in zip(generators, [*layers.reshape(-1, 2), *keras_own.reshape(-1, 2)], strict=True):
        generator.assign(numbers.astype(keras.backend.standardize_dtype(generator.dtype)))
    set_backend_state(backend.view(np.uint8))
    random_state.restore(general.view(np.uint8)[: random_state.BYTES])


def _words(contents: npt.NDArray[np.uint8]) -> States:
    return np.pad(contents, (0, -len(contents) % 8)).view(np.int64)


def _numbers(state: Any) -> list[int]:
    return [int(number) for number in np.asarray(keras.ops.convert_to_numpy(state))]


def _seed_generators() -> Any:
    return importlib.import_module("keras.src.random.seed_generator")


def _keras_generator() -> Any:
    """What ``keras.random`` draws from without a seed; asking Keras itself would make one, from a random number."""
    attributes = importlib.import_module("keras.src.backend.common.global_state")
    return attributes.get_global_attribute(_seed_generators().GLOBAL_SEED_GENERATOR)


def backend_state() -> npt.NDArray[np.uint8]:
    """The state of the backend's own global generator, where it has one, uint8 (length,)."""
    if keras.backend.backend() == "torch":
        import torch

        state: npt.NDArray[np.uint8] = torch.get_rng_state().numpy()
        return state
    generator = None
    if keras.backend.backend() == "tensorflow":  # what the training has made already
        generator = importlib.import_module("tensorflow.python.ops.stateful_random_ops").global_generator
    return np.empty(0, np.uint8) if generator is None else generator.state.numpy().view(np.uint8)


def set_backend_state(contents: npt.NDArray[np.uint8]) -> None:
    """Go on from what ``backend_state`` returned."""
    if keras.backend.backend() == "torch":
        import torch

        torch.set_rng_state(torch.from_numpy(contents[: torch.get_rng_state().numel()].copy()))
    elif len(contents):
        import tensorflow as tf

        tf.random.get_global_generator().state.assign(contents.view(np.int64))
