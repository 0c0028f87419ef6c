"""Every sample of a data set exactly once, whatever the number of ranks; the inside of ``hvdkit.keras.evaluate``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdkit.errors import InvalidArgumentError
from hvdkit.keras import state
from hvdkit.keras.data import as_arrays
from hvdkit.keras.trainer.metrics import States
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps import metrics
from hvdkit.steps.numbers import whole
from hvdkit.steps.topology import Topology


def evaluate(model: Any, dataset: Any, world: Topology, batch_size: int) -> dict[str, Any]:
    """``model.evaluate`` on all ranks together: each sample exactly once, the same result on every rank; a collective.

    Rank r takes the samples r, r + size, r + 2 * size, ... of the data set, and the states of Keras' own metrics (loss,
    accuracy, AUC, ...) are added up, as if one process had seen all samples. Other metrics are the mean of the ranks'
    results, weighted by their numbers of samples.

    Args:
        model: built and compiled, the same on all ranks.
        dataset: arrays as for ``shard``, the same on every rank; a rank may be left without a sample.
        world: the job; rank and size are used.
        batch_size: samples per step on one rank.
    Returns:
        Numbers by name, "loss" among them; an array where a metric gives one.
    Raises:
        InvalidArgumentError: not arrays, arrays of several lengths, no sample, a bad batch size, or a model that is
            not built.
        AgreementError: the ranks' metrics have different names; raised on every rank.
    """
    state.model_variables(model)
    arrays = as_arrays(dataset)
    batch_size = whole("batch_size", batch_size, 1)
    samples = keras.tree.flatten(arrays)[0].shape[0]
    if samples == 0:
        raise InvalidArgumentError("evaluate needs at least one sample, got arrays of length 0.")
    count = len(range(world.rank, samples, world.size))
    mine = slice(world.rank, None, world.size) if count else slice(1)  # a sample more, which makes the metrics
    parts = keras.tree.map_structure(lambda array: array[mine], arrays)
    named = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
    own = model.evaluate(**named, batch_size=batch_size, verbose=0, return_dict=True)
    if not count:
        model.reset_metrics()
    if world.size == 1:
        return {name: _plain(value) for name, value in own.items()}
    metrics.require_same_names(TRANSPORT, own)
    states = States(model)
    together = states.summed_results()
    states.assign(states.values)
    known = together.keys() == own.keys()  # a test_step of the user's own may return what no metric knows
    results = {name: _plain(value) for name, value in (together if known else own).items()}
    if known and states.are_additive:
        return results
    numbers = {name: value for name, value in results.items() if isinstance(value, float)}
    weighted = {name: (value * count, count) for name, value in numbers.items()}
    return {**results, **state.average(weighted, world.size)}


def _plain(value: Any) -> Any:
    """A number, or an array on the host."""
    return float(value) if np.ndim(value) == 0 else np.asarray(keras.ops.convert_to_numpy(value))
