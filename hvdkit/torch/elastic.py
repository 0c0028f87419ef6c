"""Trainings that go on when ranks come and go, with Horovod Elastic; the inside of ``hvdkit.torch``'s elastic part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.elastic import State

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.elastic import ElasticBase, Result
from hvdkit.torch.data import require_sharded
from hvdkit.torch.optimizer import forget_agreements
from hvdkit.torch.schedule import Warmup
from hvdkit.torch.state import RANKS, SHARDED, HostCopies, load_optimizer, send


class ElasticState(ElasticBase, State):  # type: ignore[misc]
    """What an elastic training is: it is committed, put back to the last commit, and given to ranks that join.

    After ranks have come or gone, ``world`` is the new one, the loader goes on at the committed sample with new shards,
    and schedule and learning rates are those of the new number of ranks.

    Args:
        model, optimizer: distributed as ever; broadcasting before is not necessary.
        loader: from ``shard``.
        schedule: from ``warmup``, or None.
        rule: "linear", "sqrt" or "none": how the optimizer's learning rates follow the number of ranks.
        values: numbers and the like that belong to the state, kept as attributes: ``step=0``.
    Raises:
        InvalidArgumentError: a loader or schedule that is not hvdkit's, or an unknown rule.
    """

    _warmup = Warmup

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loader: Any,
        schedule: Any = None,
        rule: str = "linear",
        **values: Any,
    ) -> None:
        if hasattr(optimizer, SHARDED):
            raise InvalidArgumentError(
                "with shard_state=True a rank that is lost takes its part of the optimizer's state along; leave it "
                "out, or train without ElasticState and go on from Checkpoints."
            )
        self.model, self.optimizer = model, optimizer
        self._copies = HostCopies()
        self._begin(hvd, RANKS, loader=require_sharded(loader), schedule=schedule, rule=rule, values=values)

    def _copy(self) -> Any:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return self._copies.of("", states)

    def _put_back(self, copied: Any) -> None:
        self.model.load_state_dict(copied["model"])
        # An optimizer keeps the tensors that it is given, and would train the committed ones.
        load_optimizer(self.optimizer, HostCopies().of("", copied["optimizer"]))

    def reset(self) -> None:
        """Called by Horovod after it has started anew."""
        forget_agreements()
        super().reset()

    def _broadcast(self, root: int) -> None:
        send(self.model, self.optimizer, root)

    def _scale_rates(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor


def run_elastic(train: Callable[[ElasticState], Result], state: ElasticState) -> Result:
    """Run ``train(state)`` to its end, again from the last commit whenever ranks are lost or join.

    ``train`` goes on where ``state.loader`` is and commits now and then::

        def train(state):
            for epoch in range(state.loader.epoch, epochs):
                for x, y in state.loader:
                    ...
                    state.schedule.step()
                    state.commit()

    Start it with ``hvdkit launch --min-np 1 --max-np 4 --host-discovery-script hosts.sh -n 2 -- python train.py``.
    Without an elastic launch it runs once.

    Args:
        train: returns when the training is complete; called on all ranks.
        state: made after ``init``, ``distribute``, ``shard`` and ``warmup``.
    Returns:
        What ``train`` returned.
    """
    return state._run(train)
