"""Trainings that go on when ranks come and go, with Horovod Elastic; inside ``hvdkit.tensorflow.run_elastic``.

Horovod's own ``horovod.tensorflow.elastic`` is not used: it looks for the lost peer in texts that TensorFlow no longer
writes, takes what it does not find for success, and its states broadcast when they are made, where a rank that joins
waits forever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import State
from horovod.common.exceptions import HorovodInternalError

from hvdkit.steps.elastic import ElasticBase, Result
from hvdkit.tensorflow import divergence
from hvdkit.tensorflow.data import require_sharded
from hvdkit.tensorflow.schedule import Warmup
from hvdkit.tensorflow.state import (
    RANKS,
    broadcast_variables,
    by_name,
    model_variables,
    native,
    optimizer_variables,
)
from hvdkit.tf_shared.keras_optimizer import rates, require_slots, set_rates
from hvdkit.tf_shared.keras_sharded import refuse_elastic

_LOST = (tf.errors.UnknownError, tf.errors.InternalError, tf.errors.AbortedError, tf.errors.CancelledError)
# An operation of Horovod by its type, by its name or by its text; not a file of Horovod in the stack of another one.
_OF_HOROVOD = re.compile(r"Horovod(?!/)|node hvdkit\.")


class ElasticState(ElasticBase, State):  # type: ignore[misc]
    """What an elastic training is: it is committed, put back to the last commit, and given to ranks that join.

    After ranks have come or gone, ``world`` is the new one, the loader goes on at the committed sample with new shards,
    and schedule and learning rate are those of the new number of ranks.

    Args:
        model, optimizer: as for ``broadcast_state``, the model built; broadcasting before is not necessary.
        loader: from ``shard``.
        schedule: from ``warmup``, or None.
        rule: "linear", "sqrt" or "none": how the optimizer's learning rate follows the number of ranks.
        values: numbers and the like that belong to the state, kept as attributes: ``step=0``.
    Raises:
        InvalidArgumentError: a loader or schedule that is not hvdkit's, an unknown rule, or not a Keras 3 optimizer.
    """

    _warmup = Warmup

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        loader: Any,
        schedule: Any = None,
        rule: str = "linear",
        **values: Any,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._optimizers = by_name(optimizer)
        refuse_elastic(self._optimizers)
        require_slots(self._optimizers, "ElasticState")
        self._variables = [native(one) for one in (*model_variables(model), *optimizer_variables(optimizer, model))]
        self._begin(hvd, RANKS, loader=require_sharded(loader), schedule=schedule, rule=rule, values=values)

    def _copy(self) -> Any:
        return [np.array(variable.numpy()) for variable in self._variables]

    def _put_back(self, copied: Any) -> None:
        for variable, value in zip(self._variables, copied, strict=True):
            variable.assign(value)

    def _broadcast(self, root: int) -> None:
        broadcast_variables(self._variables, root)

    def _scale_rates(self, factor: float) -> None:
        set_rates(self._optimizers, [rate * factor for rate in rates(self._optimizers)])

    def _peer_errors(self) -> AbstractContextManager[None]:
        return peers()

    def _start_anew(self) -> None:
        super()._start_anew()
        divergence.forget()


@contextmanager
def peers() -> Iterator[None]:
    """Turn TensorFlow's error about a lost rank into the one for which Horovod Elastic waits."""
    try:
        yield
    except _LOST as error:
        if not _OF_HOROVOD.search(str(error.message)):
            raise
        raise HorovodInternalError(str(error.message)) from error


def run_elastic(train: Callable[[ElasticState], Result], state: ElasticState) -> Result:
    """Run ``train(state)`` to its end, again from the last commit whenever ranks are lost or join.

    ``train`` goes on where ``state.loader`` is and commits now and then. Make the ``tf.function`` of a step in it, so
    that it is traced anew when ranks have changed: a traced one keeps every Python number of its time, such as
    ``state.world.size``. (What ``distribute`` puts into it follows by itself.)::

        def train(state):
            @tf.function
            def train_step(x, y):
                ...

            for epoch in range(state.loader.epoch, epochs):
                for x, y in state.loader:
                    train_step(x, y)
                    state.schedule.step()
                    state.commit()

    Start it with ``hvdkit launch --min-np 1 --max-np 4 --host-discovery-script hosts.sh -n 2 -- python train.py``.
    Without an elastic launch it runs once.

    Args:
        train: returns when the training is complete; called on all ranks.
        state: made after ``init``, ``shard`` and ``warmup``.
    Returns:
        What ``train`` returned.
    """
    return state._run(train)
