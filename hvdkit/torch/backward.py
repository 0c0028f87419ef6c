"""When exchanges of gradients begin and end: with a backward, also one within another, or with a step.

Which exchanges a backward reaches may follow from the batch: an optimizer for each expert. All ranks take part in those
that one of them has reached, and that each says in a message beside the gradients once all have made more than one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.mpi_ops import synchronize  # the one of ``hvd`` is a range of its own where a profile is made
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function

from hvdkit.core import listeners
from hvdkit.core.layout import said_by_some
from hvdkit.errors import AgreementError, InvalidArgumentError
from hvdkit.observe.allreduce_counts import COUNTS
from hvdkit.steps import passes, torch_tensors
from hvdkit.steps.launchers import is_elastic
from hvdkit.torch import divergence, private

if TYPE_CHECKING:
    from hvdkit.torch.exchange import Exchange


_FAILED = (
    "backward() ended with an error on some ranks, which went on without it; skip a step on every rank or on none: "
    "raise the error, or make batches that fit into memory."
)
_HELD: list[weakref.ref[Exchange]] = []
_MADE: Counter[int] = Counter()
_TOLD: dict[int, int] = {}
"""How many exchanges of a process set, by its id, each of its ranks has made as far as all know."""


def exchanges() -> list[Exchange]:
    """Those whose parameters are still in use, in the order of their numbers; a WeakSet makes microseconds of it."""
    return [exchange for held in _HELD if (exchange := held()) is not None]


def hold(exchange: Exchange) -> int:
    """Have an exchange among ``exchanges()``; returns its place."""
    _HELD[:] = map(weakref.ref, [*exchanges(), exchange])
    identity = exchange.process_set.process_set_id
    _MADE[identity] += 1
    return _MADE[identity] - 1


def tell_how_many(ranks: Any, process_set: Any, number: int = 0) -> int:
    """Let the ranks know how many exchanges each has made, a collective; returns the highest of all ranks' numbers."""
    identity = process_set.process_set_id
    told = np.stack(ranks.allgather(np.array([_MADE[identity], number]), "hvdkit.exchanges"))
    if (told[:, 0] == told[0, 0]).all():  # one more on some ranks is harmless, and says nothing of the others
        _TOLD[identity] = int(told[0, 0])
    return int(told[:, 1].max())


def exchange_all(reached: Iterable[Exchange]) -> list[Exchange]:
    """Average the gradients of what was reached, here or on another rank alone; returns these, by their numbers."""
    # All are launched before one is waited for: ranks may have reached them in another order.
    taken = list(reached)
    for exchange in taken:
        exchange.launch()
    with COUNTS.allreduce(exchange.process_set for exchange in taken if exchange.exchanging):
        for exchange in reached_elsewhere(taken):
            exchange.begin()
            exchange.launch()
            taken.append(exchange)
        taken.sort(key=lambda exchange: exchange.number)
        flags = [exchange.wait_all() for exchange in taken]  # all arrive, also where an error follows
        if any(said.failed for said in flags):
            raise AgreementError(_FAILED)
        for exchange, said in zip(taken, flags, strict=True):
            exchange.finish(said)
    return taken


def reached_elsewhere(reached: list[Exchange]) -> list[Exchange]:
    """Those that have begun on another rank, and not here; a collective where all ranks have made more than one."""
    exchanging = [exchange for exchange in reached if exchange.exchanging]
    sets = {exchange.process_set.process_set_id: exchange.process_set for exchange in exchanging}
    words, handles = {}, []
    for identity, process_set in sorted(sets.items()):
        told = _TOLD.get(identity, 0)
        # Ranks that came later (Horovod Elastic) have made others.
        if told < 2 or is_elastic():
            continue
        words[identity] = torch.zeros(told)
        for exchange in exchanging:
            if exchange.process_set.process_set_id == identity and exchange.place < told:
                words[identity][exchange.place] = 1
        name = f"hvdkit.reached.{identity}"
        handles.append(hvd.allreduce_async_(words[identity], name=name, op=hvd.Sum, process_set=process_set))
    for handle in handles:
        synchronize(handle)
    begun = {(identity, place) for identity, word in words.items() for place in word.nonzero().flatten().tolist()}
    others = [exchange for exchange in exchanges() if exchange not in reached] if begun else []
    return [exchange for exchange in others if (exchange.process_set.process_set_id, exchange.place) in begun]


def cancel(reached: list[Exchange]) -> None:
    """An error ended a backward that reached these: what is on its way, here or elsewhere, arrives for nothing."""
    if not any(exchange.in_flight() for exchange in reached):
        for exchange in reached:
            exchange.reset()
        return
    taken = [*reached]
    with COUNTS.allreduce(exchange.process_set for exchange in taken if exchange.exchanging):
        for exchange in reached_elsewhere(reached):
            exchange.begin()
            taken.append(exchange)
        for exchange in taken:
            exchange.send_empty()
        failed = [(exchange.wait_all().failed, exchange.process_set.size()) for exchange in taken]
    if any(said_by_some(*said) for said in failed):
        raise AgreementError(_FAILED)


class BackwardTracker:
    """The exchanges that the backward which runs now has reached; they end with it, together."""

    def __init__(self) -> None:
        self._reached: list[Exchange] = []
        self._thread = 0
        self._lock = threading.RLock()
        self._tasks: set[int] = set()
        self._ends: weakref.WeakSet[_End] = weakref.WeakSet()

    def mark_ready(self, exchange: Exchange, parameter: torch.Tensor) -> int:
        """A graph has reached an exchange; returns the number of the graph, which may be one within another.

        Of a model on several devices autograd has a thread for each: none may go on before the exchange has begun.
        """
        with self._lock:
            task = private.current_graph_task()
            if task not in self._tasks:
                if not self._ends:  # the graph that held them is gone: an error ended it
                    cancel(self._reached)
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
        if node is None:
            self._ends.discard(end)  # what an error leaves here is cancelled by the next backward
            with torch.no_grad():
                self._exchange()
            return
        # A callback can be queued at the end of the outer graph by a node after the one that is computed now.
        after = next(following for following, _ in node.next_functions if following is not None)

        def queue(_: Any, end: _End = end) -> None:  # noqa: ARG001  # ``end`` lives as long as there is something to come
            hook.remove()
            self._queue_end()

        hook = after.register_prehook(queue)

    def _exchange(self) -> None:
        heard = listeners.MONITORS or listeners.RECORDERS
        if heard:
            listeners.ready()
        with record_function("hvdkit:allreduce_wait") if private.is_profiled() else nullcontext():
            reached = exchange_all(self._reached)
        self._reached, self._tasks = [], set()
        if heard:
            listeners.arrived()
        if heard and listeners.wants_norm():
            norms = [exchange.norm() for exchange in reached]  # of models that may be on several devices
            whole = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
            listeners.tell_norm(torch_tensors.LaterNumber(whole) if whole.is_cuda else whole)


class _End:
    """What autograd calls at the end of a graph; it lives as long as that can still happen."""

    def __init__(self, tracker: BackwardTracker) -> None:
        self._tracker = tracker

    def __call__(self) -> None:
        self._tracker.end(self)


TRACKER = BackwardTracker()


# What happens before and after each optimizer's step, distributed or not ----------------------------------------------


@functools.cache
def look_at_steps() -> None:
    """Have every optimizer's steps seen, from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@private.eagerly
def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No step with gradients of one rank: exchange what no backward did, and average a closure's loss."""
    found = exchanges()
    if not any(exchange.steps_as(optimizer) for exchange in found):
        divergence.UNDISTRIBUTED.look(optimizer, lambda one: any(exchange.has(one) for exchange in found))
    for exchange in found:
        exchange.take_fingerprint(optimizer)
    by_place = len(args) > 1 and callable(args[1])
    closure = args[1] if by_place else kwargs.get("closure")
    if not callable(closure):
        for exchange in found:
            exchange.step_by(optimizer)
        return args, kwargs
    averaging = next((exchange.averaging(closure) for exchange in found if exchange.steps_as(optimizer)), closure)
    if by_place:
        return (args[0], averaging, *args[2:]), kwargs
    return args, {**kwargs, "closure": averaging}


@private.eagerly
def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    found = exchanges()
    if any(exchange.steps_as(optimizer) for exchange in found):
        passes.stepped()
    for exchange in found:
        exchange.stepped(optimizer)
