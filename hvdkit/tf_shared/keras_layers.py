"""What ``hvdkit.keras`` and ``hvdkit.tensorflow`` both ask of Keras: names of variables, layers, random generators.

What Keras does not promise here has a test in ``tests/parallel/test_keras_private.py``. Where a layer's layers and own
variables are not there, a list of variables serves ``hvdkit.tensorflow`` in the place of a model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.steps.seeds import Seeds, integer


def plain_path(variable: Any) -> str:
    """A variable's path without Keras' automatic numbers: equal on ranks that have built other layers before."""
    return re.sub(r"_\d+(?=[/_]|$)", "", getattr(variable, "path", None) or variable.name.removesuffix(":0"))


def common_names(variables: Iterable[Any]) -> list[str]:
    """Names for variables that are equal on all ranks: their plain paths, numbered where several have the same."""
    seen: Counter[str] = Counter()
    names = []
    for path in map(plain_path, variables):
        names.append(f"{path}.{seen[path]}" if seen[path] else path)
        seen[path] += 1
    return names


def layers_of(model: Any, include_self: bool = True) -> list[Any]:
    """All layers in a layer or model, those within layers included; ``.layers`` has the outermost alone."""
    return list(model._flatten_layers(include_self=include_self))


def untrained_of(layer: Any) -> list[Any]:
    """What a layer keeps that is never trained; among ``non_trainable_variables`` are frozen weights, too."""
    return list(layer._non_trainable_variables)


def on_host(value: Any) -> npt.NDArray[Any]:
    """A variable, a tensor or a number for NumPy, to be read at once: it may be the memory of the backend."""
    # convert_to_numpy makes NumPy warn of a copy, an error under `python -W error`; a tensor of torch needs it.
    return np.asarray(keras.ops.convert_to_numpy(value) if keras.backend.backend() == "torch" else value)


# Random numbers -------------------------------------------------------------------------------------------------------


def seed_keras(seed: int) -> None:
    """Seed Python's ``random`` and the backend, from which Keras draws; NumPy's generator stays where it is."""
    numpys = np.random.get_state()
    keras.utils.set_random_seed(seed)
    np.random.set_state(numpys)


def keras_generator(*, make: bool = False) -> Any:
    """What ``keras.random`` draws from without a seed, or None; asking Keras would make one, from a random number."""
    from keras.src.backend.common import global_state  # within: a version that has none is told in a sentence
    from keras.src.random import seed_generator

    if make:
        return seed_generator.global_seed_generator()
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def generator_states(layers: Iterable[Any]) -> list[Any]:
    """The states (seed, numbers drawn) of the random generators in layers or models, int (2,) each, each once."""
    layers = list(layers)
    weights = {id(weight) for layer in layers for weight in layer.weights}
    return list({id(one): one for layer in layers for one in layer.variables if id(one) not in weights}.values())


def state_numbers(state: Any) -> list[int]:
    """The state of a generator: its seed, and the numbers drawn."""
    return [int(number) for number in on_host(state)]


def move_generators(states: Iterable[Any], seeds: Seeds, *purpose: int) -> list[int]:
    """Have generators draw this rank's own numbers from now on, each by the seed that it had; returns their new seeds.

    Args:
        states: of ``generator_states``.
        purpose: of the branch of this rank's stream, see ``Seeds.own``.
    """
    moved = []
    for state in states:
        seed, drawn = state_numbers(state)
        moved.append(integer(seeds.own(*purpose, seed % 2**32), bits=31))
        state.assign(np.array([moved[-1], drawn]).astype(keras.backend.standardize_dtype(state.dtype)))
    return moved
