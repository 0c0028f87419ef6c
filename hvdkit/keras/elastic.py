"""Keras trainings that go on when ranks come and go, with Horovod Elastic; an inside of ``hvdkit.keras``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from hvdkit.errors import InvalidArgumentError, whole
from hvdkit.keras import state as keras_state
from hvdkit.keras.data import ShardedData, require_sharded, trained_on
from hvdkit.keras.optimizer import meant_by
from hvdkit.keras.schedule import Warmup
from hvdkit.keras.trainer.callbacks import Callback
from hvdkit.keras.transport import TRANSPORT, HorovodTransport
from hvdkit.steps.elastic import ElasticBase, Result
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.keras_optimizer import rates, require_slots, set_rates
from hvdkit.tf_shared.keras_sharded import refuse_elastic

try:
    from horovod.common.elastic import State
except ImportError:  # jax over mpi4py trains without Horovod, but not elastically
    State = object


class ElasticState(ElasticBase, State):  # type: ignore[misc]
    """What an elastic training is: it is committed, put back to the last commit, and given to ranks that join.

    After ranks have come or gone, ``world`` is the new one, the loader goes on at the committed sample with new shards,
    and schedule and learning rates are those of the new number of ranks. On the backends tensorflow and torch.

    Args:
        model, optimizer: built and distributed as ever; broadcasting before is not necessary.
        loader: from ``shard``.
        schedule: from ``warmup`` or a ``Warmup``, or None.
        rule: "linear", "sqrt" or "none": how the optimizer's learning rate follows the number of ranks.
        values: numbers and the like that belong to the state, kept as attributes: ``step=0``.
    Raises:
        InvalidArgumentError: a loader or schedule that is not hvdkit's, an unknown rule, a model that is not built,
            or another backend.
    """

    _warmup = Warmup

    def __init__(
        self, model: Any, optimizer: Any, *, loader: Any, schedule: Any = None, rule: str = "linear", **values: Any
    ) -> None:
        transport = _transport()
        refuse_elastic(meant_by(optimizer, model))
        self.model, self.optimizer = model, optimizer
        given = require_sharded(loader)
        self._begin(transport.hvd, transport, loader=given, schedule=schedule, rule=rule, values=values)

    def reset(self) -> None:
        """Called by Horovod after it has started anew."""
        if keras.backend.backend() == "torch":
            from hvdkit.torch.optimizer import forget_agreements

            forget_agreements()
        super().reset()

    def _copy(self) -> Any:
        return [keras_state.value_of(one) for one in self._variables()]

    def _put_back(self, copied: Any) -> None:
        for variable, value in zip(self._variables(), copied, strict=True):
            variable.assign(value)

    def _broadcast(self, root: int) -> None:
        TRANSPORT.broadcast_variables(self._variables(), keras_state.value_of, root)

    def _scale_rates(self, factor: float) -> None:
        optimizers = meant_by(self.optimizer, self.model)
        set_rates(optimizers, [rate * factor for rate in rates(optimizers)])

    def _place(self, world: Topology) -> Topology:
        return keras_state.follow(world)

    def _peer_errors(self) -> AbstractContextManager[None]:
        if keras.backend.backend() != "tensorflow":
            return nullcontext()  # Horovod for PyTorch raises the right error itself
        from hvdkit.tensorflow import elastic

        return elastic.peers()

    def _start_anew(self) -> None:
        transport = _transport()
        transport.shutdown()
        transport.hvd.init()

    def _variables(self) -> list[Any]:
        model = keras_state.model_variables(self.model)
        optimizers = meant_by(self.optimizer, self.model)
        require_slots(optimizers, "ElasticState")
        return model + keras_state.optimizer_variables(optimizers, self.model)


class ElasticCommit(Callback):
    """Commits an ``ElasticState`` while ``fit`` trains; the last in the list of callbacks.

    Args:
        state: of this training.
        every: commit after so many steps of each epoch, again and again, and at its end.
    Raises:
        InvalidArgumentError: ``every`` below 1, not an ``ElasticState``, or (from ``fit``) other data than its loader.
    """

    def __init__(self, state: Any, every: int = 10) -> None:
        super().__init__()
        if not isinstance(state, ElasticState):
            raise InvalidArgumentError(f"state must be an ElasticState, got {type(state).__name__}.")
        self._state: ElasticState = state
        self._every = whole("every", every, 1)
        self._last_batch = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        loader: ShardedData = self._state.loader
        if trained_on(self.model) is not loader or self.params["steps"] != len(loader):
            raise InvalidArgumentError(
                "ElasticCommit needs fit to train on the state's loader, whole epochs; call fit(state.loader, ...) "
                "without steps_per_epoch."
            )
        self._last_batch = loader.steps_done - 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras, with steps_per_execution for several steps at once."""
        last, self._last_batch = self._last_batch, batch
        at_the_end = batch + 1 >= self.params["steps"]  # then the other callbacks have their turn first
        if (batch + 1) // self._every > (last + 1) // self._every and not at_the_end:
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._state.commit()


def run_elastic(train: Callable[[ElasticState], Result], state: ElasticState) -> Result:
    """Run ``train(state)`` to its end, again from the last commit whenever ranks are lost or join.

    ``train`` goes on where ``state.loader`` is and commits now and then::

        def train(state):
            commit = hk.ElasticCommit(state, every=10)
            model.fit(state.loader, initial_epoch=state.loader.epoch, epochs=epochs, callbacks=[schedule, commit])

    Start it with ``hvdkit launch --min-np 1 --max-np 4 --host-discovery-script hosts.sh -n 2 -- python train.py``.
    Without an elastic launch it runs once.

    Args:
        train: returns when the training is complete; called on all ranks.
        state: made after ``init``, ``distribute``, ``shard`` and ``warmup``.
    Returns:
        What ``train`` returned.
    """
    return state._run(train)


def _transport() -> HorovodTransport:
    if not isinstance(TRANSPORT, HorovodTransport):
        raise InvalidArgumentError(
            f"elastic training needs the Keras backend tensorflow or torch, got {keras.backend.backend()}; set "
            "KERAS_BACKEND before Keras is imported."
        )
    return TRANSPORT
