"""What happens at the end of ``backward()``, also of one that runs within another; used by ``exchange``."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import step_times
from hvdkit.torch import multi_optimizer, private


class BackwardTracker:
    """The exchanges that the backward which runs now has reached; they end with it, together."""

    def __init__(self) -> None:
        self._reached: list[multi_optimizer.ReachedExchange] = []
        self._thread = 0
        self._tasks: set[int] = set()
        self._ends: weakref.WeakSet[_End] = weakref.WeakSet()

    def mark_ready(self, exchange: multi_optimizer.ReachedExchange, parameter: torch.Tensor) -> int:
        """A graph has reached an exchange; returns the number of the graph, which may be one within another.

        Raises:
            InvalidArgumentError: another thread is in backward.
        """
        task = private.current_graph_task()
        if task not in self._tasks:
            if not self._ends:  # the graph that held them is gone: an error ended it
                multi_optimizer.cancel(self._reached)
                self._reached, self._tasks = [], set()
            thread = threading.get_ident()  # of a GPU's hooks it is the device's
            if self._reached and thread != self._thread and parameter.device.type == "cpu":
                raise InvalidArgumentError(
                    "two threads are in backward() at a time, and ranks may order them differently; let one thread "
                    "train after the other."
                )
            self._thread = thread
            self._tasks.add(task)
            self._queue_end()
        if exchange not in self._reached:
            self._reached.append(exchange)
            exchange.begin()
        return task

    def _queue_end(self) -> None:
        end = _End(self)
        self._ends.add(end)
        private.at_the_end_of_backward(end)

    @private.eagerly
    def end(self, end: _End) -> None:
        """The graph is done, or a graph within another: activation checkpointing calls backward within backward."""
        node = private.current_node()
        if node is not None:
            self._end_with(node, end)
            return
        self._ends.discard(end)  # what an error leaves here is cancelled by the next backward
        with torch.no_grad():
            self._exchange()

    def _exchange(self) -> None:
        step_times.ready()
        with record_function("hvdkit:allreduce_wait") if private.is_profiled() else nullcontext():
            reached = multi_optimizer.exchange_all(self._reached)
        self._reached, self._tasks = [], set()
        step_times.arrived()
        if step_times.wants_norm():
            norms = [exchange.norm() for exchange in reached]  # of models that may be on several devices
            step_times.tell_norm(torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms])))

    def _end_with(self, node: Any, end: _End) -> None:
        """End with the graph of which ``node`` is computed now: a callback can be queued there by a node after it."""
        after = next(one for one, _ in node.next_functions if one is not None)

        def queue(_: Any, end: _End = end) -> None:  # noqa: ARG001  # ``end`` lives as long as there is something to come
            hook.remove()
            self._queue_end()

        hook = after.register_prehook(queue)


class _End:
    """What autograd calls at the end of a graph; it lives as long as that can still happen."""

    def __init__(self, tracker: BackwardTracker) -> None:
        self._tracker = tracker

    def __call__(self) -> None:
        self._tracker.end(self)


TRACKER = BackwardTracker()
