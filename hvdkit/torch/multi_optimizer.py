"""All ranks take part in the exchanges that one of them has reached; used by ``backward`` and ``exchange``.

Which exchange a backward reaches may follow from the batch: an optimizer for each expert. Where a program has more than
one, each says which it has reached before it waits, in a message that travels beside the gradients. That begins when
all ranks have told each other, where they meet anyway, that they have made as many.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.mpi_ops import synchronize  # the one of ``hvd`` is a range of its own where a profile is made

from hvdkit.steps.allreduce_counts import COUNTS
from hvdkit.steps.launchers import is_elastic


class ReachedExchange(Protocol):
    """An exchange, as what begins and ends it sees it.

    Attributes:
        number: in the order in which the program has made them.
        process_set: Horovod's.
        place: how many of this process set were made before it.
        exchanging: whether gradients travel, since it has begun.
    """

    number: int
    process_set: Any
    place: int
    exchanging: bool

    def begin(self) -> None: ...
    def launch(self) -> None: ...
    def finish(self) -> None: ...
    def in_flight(self) -> bool: ...
    def norm(self) -> torch.Tensor: ...
    def cancel(self) -> None: ...


_HELD: list[weakref.ref[Any]] = []
_MADE: Counter[int] = Counter()
_TOLD: dict[int, int] = {}
"""How many exchanges of a process set, by its id, each of its ranks has made as far as all know."""


def exchanges() -> list[Any]:
    """Those whose parameters are still in use, in the order of their numbers; a WeakSet makes microseconds of it."""
    return [one for held in _HELD if (one := held()) is not None]


def hold(exchange: ReachedExchange) -> int:
    """Have an exchange among ``exchanges()``; returns its place."""
    _HELD[:] = map(weakref.ref, [*exchanges(), exchange])
    identity = exchange.process_set.process_set_id
    _MADE[identity] += 1
    return _MADE[identity] - 1


def tell_how_many(ranks: Any, process_set: Any, number: int = 0) -> int:
    """Let the ranks know how many exchanges each has made, a collective; returns the highest of all ranks' numbers.

    Args:
        ranks: with ``gather``; see ``TorchRanks``.
    """
    identity = process_set.process_set_id
    told = np.stack(ranks.allgather(np.array([_MADE[identity], number]), "hvdkit.exchanges"))
    if (told[:, 0] == told[0, 0]).all():  # one more on some ranks is harmless, and says nothing of the others
        _TOLD[identity] = int(told[0, 0])
    return int(told[:, 1].max())


def exchange_all(reached: Iterable[ReachedExchange]) -> list[ReachedExchange]:
    """Average the gradients of what was reached, here or on another rank alone; returns these, by their numbers.

    Raises:
        AgreementError, InvalidArgumentError: see ``Exchange.finish``.
    """
    # All are launched before one is waited for: ranks may have reached them in another order.
    taken = list(reached)
    for exchange in taken:
        exchange.launch()
    with COUNTS.allreduce(exchange.process_set for exchange in taken if exchange.exchanging):
        for exchange in reached_elsewhere(taken):
            exchange.begin()
            exchange.launch()
            taken.append(exchange)
        taken.sort(key=lambda one: one.number)
        for exchange in taken:
            exchange.finish()
    return taken


def reached_elsewhere(reached: list[ReachedExchange]) -> list[ReachedExchange]:
    """Those that have begun on another rank, and not here; a collective where all ranks have made more than one."""
    sets = {one.process_set.process_set_id: one.process_set for one in reached if one.exchanging}
    words, handles = {}, []
    for identity, process_set in sorted(sets.items()):
        told = _TOLD.get(identity, 0)
        # Ranks that came later (Horovod Elastic) have made others.
        if told < 2 or is_elastic():
            continue
        words[identity] = torch.zeros(told)
        for one in reached:
            if one.exchanging and one.process_set.process_set_id == identity and one.place < told:
                words[identity][one.place] = 1
        name = f"hvdkit.reached.{identity}"
        handles.append(hvd.allreduce_async_(words[identity], name=name, op=hvd.Sum, process_set=process_set))
    for handle in handles:
        synchronize(handle)
    begun = {(identity, place) for identity, word in words.items() for place in word.nonzero().flatten().tolist()}
    others = [one for one in exchanges() if one not in reached] if begun else []
    return [one for one in others if (one.process_set.process_set_id, one.place) in begun]


def cancel(reached: list[ReachedExchange]) -> None:
    """An error ended a backward that reached these.

    Raises:
        AgreementError: see ``Exchange.cancel``.
    """
    if any(exchange.in_flight() for exchange in reached):
        reached_elsewhere(reached)  # the other ranks wait for what this one says, too
    for exchange in reached:
        exchange.cancel()
