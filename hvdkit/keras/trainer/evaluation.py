"""``evaluate`` and ``predict`` of what ``shard`` made, on all ranks together; an inside of ``hvdkit.keras``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdkit.errors import AgreementError, InvalidArgumentError, whole
from hvdkit.keras import private, state
from hvdkit.keras.data import SHARDED, Evaluation, ShardedData, as_arrays
from hvdkit.keras.trainer.metrics import States, note
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps import metrics
from hvdkit.steps.shards import Shard
from hvdkit.steps.topology import Topology


def part_of(data: Any, steps: int | None) -> tuple[Any, int | None]:
    """What this rank reads of sharded data in an evaluation, and of how many samples it is; None: nobody knows.

    A rank without any reads a batch of another rank's, by which Keras makes the metrics, and it counts nothing.

    Raises:
        InvalidArgumentError: no rank has a batch, as far as this one can know.
    """
    if isinstance(data, Evaluation):
        return data, data.samples
    world = state.world()
    if (data.share.world.rank, data.share.world.size) != (world.rank, world.size):
        data.follow(world)  # ranks have come or gone
    part = data.evaluation(steps)
    if isinstance(part, Evaluation):
        return part, part.samples
    if next(iter(part), None) is not None:
        return part, None
    part = data.first_of_all()
    if next(iter(part), None) is None:
        raise InvalidArgumentError("the data set has no sample to evaluate; give every rank at least one.")
    return part, 0


def evaluating(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``keras.Model.evaluate``."""
    signature = inspect.signature(plain)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        model, data = call.arguments["self"], call.arguments["x"]
        if state.world().size > 1:
            note(model)
        if not isinstance(data, (*SHARDED, Evaluation)) or "_use_cached_eval_dataset" in kwargs:
            return plain(*args, **kwargs)
        call.arguments["x"], samples = part_of(data, call.arguments["steps"])
        as_dict = call.arguments["return_dict"]
        call.arguments.update(steps=None, return_dict=True)
        _only_the_root_prints(call.arguments)
        results = plain(*call.args, **call.kwargs)
        if state.world().size > 1:
            results = _of_all_ranks(model, results, samples)
        return results if as_dict else private.in_order(model, results)

    return evaluate


def _of_all_ranks(model: Any, own: dict[str, Any], samples: int | None) -> dict[str, Any]:
    metrics.require_same_names(TRANSPORT, own)
    if samples == 0:
        model.reset_metrics()
    states = States(model)
    together = states.summed_results(samples)
    if together.keys() == own.keys():
        return {name: _plain(value) for name, value in together.items()}
    # A test_step of the user's own may return what no metric knows.
    states.assign(states.values)
    weight = (states.samples or 1.0) if samples is None else samples
    numbers = {name: _plain(value) for name, value in own.items()}
    weighted = {name: (value * weight, weight) for name, value in numbers.items() if isinstance(value, float)}
    return {**numbers, **state.average(weighted, state.world().size)}


def _plain(value: Any) -> Any:
    """A number, or an array on the host."""
    return float(value) if np.ndim(value) == 0 else np.asarray(keras.ops.convert_to_numpy(value))


def evaluate(model: Any, dataset: Any, world: Topology, batch_size: int) -> dict[str, Any]:
    """``model.evaluate`` on all ranks together: each sample exactly once, the same result on every rank; a collective.

    The batches are those of one process, dealt out, and the states of metrics are added up, as if it had seen them all.
    The states of a metric of your own are tried; of one whose states do not add up (a running maximum), the result is
    the mean of the ranks', weighted by their samples, with a warning where these differ.
    ``model.evaluate(shard(dataset, world, batch_size))`` is the same.

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
    data = ShardedData(arrays, Shard(samples, world, batch_size, "pad"))
    results: dict[str, Any] = model.evaluate(data, verbose=0, return_dict=True)
    return {name: _plain(value) for name, value in results.items()}


def predicting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For ``keras.Model.predict``."""
    signature = inspect.signature(plain)

    def predict(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        data = call.arguments["x"]
        if not isinstance(data, SHARDED):
            return plain(*args, **kwargs)
        if getattr(data.share, "by_files", False) and state.world().size > 1:
            raise InvalidArgumentError(
                "the samples of shard_files have no order of all ranks, in which predict could give its results; "
                "predict this rank's with predict(data.evaluation()), or shard the data set without shard_files."
            )
        call.arguments["x"], samples = part_of(data, call.arguments["steps"])
        call.arguments["steps"] = None
        _only_the_root_prints(call.arguments)
        mine = plain(*call.args, **call.kwargs)
        if state.world().size == 1:
            return mine
        leaves = [one[:0] if samples == 0 else one for one in keras.tree.flatten(mine)]
        wrong = None
        if samples is not None and any(len(one) != samples for one in leaves):
            wrong = InvalidArgumentError(
                f"predict needs one row for each of this rank's {samples} samples, got {[len(one) for one in leaves]}; "
                "call predict(data.evaluation()) for what predict_step makes of this rank's batches."
            )
        TRANSPORT.raise_together(wrong)  # a rank without a sample has none too few
        return keras.tree.pack_sequence_as(mine, [_in_order(one, data.share.batch_size) for one in leaves])

    return predict


def _in_order(mine: Any, batch_size: int) -> Any:
    """The rows of all ranks, whose batches were dealt out one by one."""
    is_array = isinstance(mine, np.ndarray)  # else TensorFlow's ragged rows
    row = f"{mine.shape[1:]} {mine.dtype}" if is_array else type(mine).__name__
    if len(set(TRANSPORT.gather_texts(row, "hvdkit.predict.rows"))) > 1 or not is_array:
        raise AgreementError(
            f"the predictions have several shapes, those of this rank {row}; pad them to one shape, or predict this "
            "rank's part alone: predict(data.evaluation())."
        )
    sent = np.ascontiguousarray(mine).reshape(len(mine), math.prod(mine.shape[1:])).view(np.uint8)
    batches = [
        np.split(rows, range(batch_size, len(rows), batch_size)) for rows in TRANSPORT.allgather(sent, "hvdkit.predict")
    ]
    dealt = [one for step in range(max(map(len, batches))) for one in (rank[step : step + 1] for rank in batches)]
    rows = np.concatenate([batch for one in dealt for batch in one])
    return rows.view(mine.dtype).reshape(-1, *mine.shape[1:])


def _only_the_root_prints(arguments: dict[str, Any]) -> None:
    if not state.world().is_root:
        arguments["verbose"] = 0
