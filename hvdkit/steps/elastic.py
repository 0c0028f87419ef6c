"""What an elastic training is in every framework: commits, the way back to the last one, the number of ranks."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from hvdkit.core import compression, listeners
from hvdkit.core.communicator import Communicator
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import learning_rate, outer, passes, starting
from hvdkit.steps.launchers import is_elastic
from hvdkit.steps.streams import StreamInEpochs
from hvdkit.steps.topology import Topology

Result = TypeVar("Result")


class ElasticBase(ABC):
    """The part of a framework binding's ``ElasticState`` that knows no framework; stands before Horovod's ``State``."""

    loader: Any  # the sharded data, whose position is committed
    schedule: Any  # the warmup, or None
    world: Topology  # the ranks that there are now
    _warmup: Any  # the class of what ``warmup`` returns

    def _begin(
        self, horovod: Any, ranks: Communicator, *, loader: Any, schedule: Any, rule: str, values: dict[str, Any]
    ) -> None:
        """Take the first commit.

        Args:
            horovod: Horovod's module for the framework.
            ranks: all of the job, however many there are.
            rule: how learning rates follow the number of ranks.
            values: of the user's own, kept as attributes.
        Raises:
            InvalidArgumentError: an unknown rule, or a schedule or stream that cannot follow the ranks.
        """
        if schedule is not None and not isinstance(schedule, self._warmup):
            raise InvalidArgumentError(f"schedule must be from warmup, got {type(schedule).__name__}.")
        learning_rate.scale_factor(1, rule)
        if isinstance(loader, StreamInEpochs):
            raise InvalidArgumentError(
                "a stream cannot follow ranks that come and go; give an elastic training arrays (shard((x, y), ...))."
            )
        self._horovod, self._ranks, self._rule = horovod, ranks, rule
        self.loader, self.schedule, self.world = loader, schedule, loader.share.world
        self._names = tuple(values)
        vars(self).update(values)
        self._commits = 0
        self.save()
        self._commits = 0  # nothing is trained yet: a rank that has committed knows more
        super().__init__(bcast_object=horovod.broadcast_object, get_rank=horovod.rank)  # type: ignore[call-arg]

    @abstractmethod
    def _copy(self) -> Any:
        """Model and optimizer, copied to the host's memory."""

    @abstractmethod
    def _put_back(self, copied: Any) -> None:
        """Make model and optimizer what ``_copy`` returned, which is kept."""

    @abstractmethod
    def _broadcast(self, root: int) -> None:
        """Give every rank the root's model and optimizer; a collective."""

    @abstractmethod
    def _scale_rates(self, factor: float) -> None:
        """Multiply the optimizer's learning rates."""

    def _place(self, world: Topology) -> Topology:
        """Tell whoever else must know that the ranks are others."""
        return world

    def _peer_errors(self) -> AbstractContextManager[None]:
        """Where a lost rank's error becomes the one that Horovod Elastic waits for."""
        return nullcontext()

    def _start_anew(self) -> None:
        """Have Horovod find the ranks that there are now."""
        self._horovod.shutdown()
        self._horovod.init()

    def _run(self, train: Callable[[Any], Result]) -> Result:
        """The inside of a framework binding's ``run_elastic``."""
        if not is_elastic():
            self.sync()
            return train(self)
        from horovod.common.elastic import run_fn

        def attempt(state: Any) -> Result:
            with self._peer_errors():
                return train(state)

        result: Result = run_fn(attempt, self._start_anew)(self)
        return result

    def commit(self) -> None:
        """Keep the present state in the host's memory, and let ranks join that are waiting. In Keras' ``fit``:
        ``ElasticCommit``.

        Call it between steps, on all ranks, every few steps: what is not committed is trained again after a failure.

        Raises:
            InvalidArgumentError: (TensorFlow) the loader was iterated where its batches cannot be counted.
        """
        super().commit()  # type: ignore[misc]  # of Horovod's State, which stands behind

    def save(self) -> None:
        """Called by ``commit``."""
        self._committed = (self._copy(), self.loader.state(), copy.deepcopy(self._values()))
        self._steps = listeners.done()
        self._commits += 1

    def restore(self) -> None:
        """Called by Horovod when ranks are lost: back to the last commit."""
        copied, position, values = self._committed
        self._put_back(copied)
        passes.go_on_elsewhere()
        self.loader.load_state(position)
        vars(self).update(copy.deepcopy(values))

    def sync(self) -> None:
        """Called by Horovod when the ranks have met: all take the state of the one that has committed most."""
        outer.forget()
        with self._peer_errors():
            everyone = self._ranks.allgather(np.array([self._commits], dtype=np.int64), "hvdkit.elastic.commits")
            commits = np.concatenate(everyone).tolist()
            root = commits.index(max(commits))
            self._broadcast(root)
            mine = (self.loader.state(), self._values(), self._commits, self._steps)
            everything = self._horovod.broadcast_object(mine, root_rank=root, name="hvdkit.elastic.values")
        passes.go_on_elsewhere()
        position, values, self._commits, steps = everything
        self.loader.load_state(position)
        vars(self).update(values)
        if self._commits:  # before, it begins where each monitor says
            listeners.go_to(steps, self.loader.epoch)
        self._follow_size(self._horovod.size())  # a rank that joins has got rates that follow the new number already
        self.save()

    def reset(self) -> None:
        """Called by Horovod after it has started anew."""
        compression.start_anew()
        self._follow_size(self.world.size)
        listeners.go_to(self._steps, self.loader.epoch)
        listeners.follow(self.world)
        self.save()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _follow_size(self, before: int) -> None:
        """Adapt loader, schedule and learning rates, which are those of ``before`` ranks."""
        self.world = self._place(starting.of(self._horovod, self.world.launcher))
        self.loader.follow(self.world)
        if self.world.size != before:
            now, then = (learning_rate.scale_factor(size, self._rule) for size in (self.world.size, before))
            self._scale_rates(now / then)
        if self.schedule is not None:
            self.schedule.follow(self.world, len(self.loader.share))
            self.schedule.go_to(self.loader.position.steps(self.loader.share))
