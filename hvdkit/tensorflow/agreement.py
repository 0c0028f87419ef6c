"""Do all ranks hold the same TensorFlow training? The inside of ``hvdkit.tensorflow``'s ``check_agreement``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.steps import agreement
from hvdkit.steps.topology import Topology
from hvdkit.tensorflow import seeds, state
from hvdkit.tensorflow.data import require_sharded
from hvdkit.tensorflow.state import local_statistics, native
from hvdkit.tf_shared.keras_sharded import shared_variables

_CHUNK = 4 * agreement.CHUNK  # words mixed at once: on a GPU fewer operations count more than a CPU's cache
_WORDS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def check_agreement(
    model: Any,
    optimizer: Any | None,
    world: Topology,
    *,
    loader: Any = None,
    statistics: bool = False,
) -> None:
    """Check that all ranks hold bit-identical variables and optimizer state; a collective.

    Variables are digested on the device where they are, and one allreduce of 16 bytes compares the digests; only when
    they differ is more sent, to say where. After ``seed_everything`` its seed is compared too, and that TensorFlow was
    not seeded anew behind its back.

    Args:
        model: as for ``broadcast_state``; its variables are compared.
        optimizer: its slots, step counter and settings (the learning rate) are compared.
        world: the job.
        loader: from ``shard``: its epoch, seed and sizes are compared. Not one behind ``.repeat()``: that reads ahead.
        statistics: compare BatchNormalization's moving statistics as well. They are each rank's own, but after
            ``average_statistics``. (Among plain variables nothing tells which they are: there all are compared.)
    Raises:
        AgreementError: on every rank; names the first differing variable, the ranks on each side and, where the
            layouts match, the largest difference.
        InvalidArgumentError: a loader that is not from ``shard``, not a Keras 3 optimizer, a model that is not built
            yet, or a call inside ``tf.function``.
    """
    state.require_eager("check_agreement")
    variables = state.model_variables(model)
    if not statistics:
        local = {id(variable) for variable in local_statistics(model)}
        variables = [variable for variable in variables if id(variable) not in local]
    numbers: dict[str, float] = {}
    optimizers = state.by_name(optimizer)
    owners = [""] * len(variables)
    for name, one in optimizers.items():
        compared = shared_variables(one)
        owners += [f"{name}: " if len(optimizers) > 1 else ""] * len(compared)
        variables += compared
        _collect_numbers(numbers, name, one.get_config())
    fixes: dict[str, str] = {}
    loaders = {} if loader is None else require_sharded(loader).share.facts(loader.epoch)
    for facts, fix in ((loaders, agreement.ITERATE_ALIKE), (seeds.facts(), agreement.SEED_ALIKE)):
        numbers.update(facts)
        fixes.update(dict.fromkeys(facts, fix))
    if world.size > 1:
        rows = [*map(state.layout, variables), *numbers]
        values = [*digests(variables), *(agreement.digest(np.float64(number)) for number in numbers.values())]

        def value_at(position: int) -> tuple[str, npt.NDArray[Any]]:
            if position >= len(variables):
                name, number = list(numbers.items())[position - len(variables)]
                return name, np.array(number)
            variable = variables[position]
            path = getattr(variable, "path", None) or variable.name.removesuffix(":0")
            return owners[position] + path, native(variable).numpy()

        agreement.require_same_values(state.RANKS, rows, values, value_at, fixes)
    seeds.require_own_stream()


class CheckAgreement(agreement.EveryFewSteps):
    """``check_agreement`` every ``every`` steps: call ``step()`` after each step of the optimizer, on all ranks.

    Args:
        model, optimizer, world, loader, statistics: see ``check_agreement``.
        every: steps from one check to the next, the same on every rank.
        on_disagreement: "raise" (on every rank, none waits for another) or "warn" and train on.
    Raises:
        InvalidArgumentError: ``every`` below 1, an unknown reaction, or (from ``step``) a call inside ``tf.function``.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any | None,
        world: Topology,
        every: int = 100,
        *,
        loader: Any = None,
        statistics: bool = False,
        on_disagreement: str = "raise",
    ) -> None:
        def check() -> None:
            check_agreement(model, optimizer, world, loader=loader, statistics=statistics)

        super().__init__(check, every, on_disagreement)

    def step(self) -> None:
        """Count one step, and check when it is time.

        Raises:
            AgreementError: on every rank, naming the step, unless the reaction is "warn".
            InvalidArgumentError: inside ``tf.function``, where it would count once.
        """
        state.require_eager("CheckAgreement's step")
        super().step()


def _collect_numbers(numbers: dict[str, float], prefix: str, value: Any) -> None:
    """The numeric settings of an optimizer, those of a schedule and of an inner optimizer included."""
    if isinstance(value, (bool, int, float)):
        numbers[prefix] = float(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect_numbers(numbers, prefix if key == "config" else f"{prefix}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _collect_numbers(numbers, f"{prefix}.{index}", item)


def digests(variables: Sequence[Any]) -> npt.NDArray[np.int64]:
    """A digest of each variable's bits, int64 (len(variables),); made where they are."""
    tensors = [tf.convert_to_tensor(native(variable)) for variable in variables]
    if any("GPU" in tensor.device for tensor in tensors):
        return digests_on_device(tensors).numpy()  # type: ignore[no-any-return]
    return agreement.array_digests((tensor.numpy() for tensor in tensors), _CHUNK)  # NumPy mixes faster on a CPU


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def digests_on_device(tensors: list[Any]) -> Any:
    """The same digests of one or more tensors by TensorFlow's operations, a tensor int64 (len(tensors),)."""
    return tf.stack([_digest(tensor) for tensor in tensors])


def _digest(tensor: Any) -> Any:
    words = _words(tensor)
    parts = (tf.cast(words[start : start + _CHUNK], tf.int64) for start in range(0, words.shape[0], _CHUNK))

    def shift(words: Any, distance: int) -> Any:
        return tf.bitcast(tf.bitwise.right_shift(tf.bitcast(words, tf.uint64), distance), tf.int64)

    sums = (tf.reduce_sum(agreement.salted(part, _salts()[: part.shape[0]], shift)) for part in parts)
    return tf.convert_to_tensor(agreement.join_chunks(sums), dtype=tf.int64)


def _words(tensor: Any) -> Any:
    """A tensor's bits as integers: eight bytes in each where that comes out even."""
    flat = tf.reshape(tf.cast(tensor, tf.int8) if tensor.dtype == tf.bool else tensor, [-1])
    size = flat.dtype.size
    if size < 8 and flat.shape[0] * size % 8 == 0:
        return tf.bitcast(tf.reshape(flat, [-1, 8 // size]), tf.int64)
    return tf.reshape(tf.bitcast(flat, _WORDS[min(size, 8)]), [-1])  # a complex128 is two


@functools.cache
def _salts() -> Any:
    with tf.init_scope():  # one tensor for all functions
        return tf.constant(agreement.salts(_CHUNK))
