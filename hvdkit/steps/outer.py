"""Step 4 over slow networks: each group of ranks trains on its own, and all take one outer step every so many (DiLoCo).

The ranks of a group (of a host) average their gradients as ever. What the groups have learned since the last outer
step, anchor - weights, is averaged over all ranks, and an optimizer of its own applies the mean to the anchor:

=============  ==========  =====================================================================================
``outer``      defaults    v <- momentum * v + mean; anchor <- anchor - lr * (mean + momentum * v)
=============  ==========  =====================================================================================
``average``    1, 0        the mean of the ranks' weights (local SGD, FedAvg)
``nesterov``   0.7, 0.9    SGD with Nesterov momentum
=============  ==========  =====================================================================================

Anchor and v lie in the host's memory, in 4 bytes a number each (8 where weights are float64); fragments are sent.
With ``overlap=0`` every rank waits, and has the anchor's bits as its weights after an outer step. With ``overlap=t``
fragments leave one after another during a window, each comes back t steps later, and weights become the mean of the
anchor and of what this rank has. ``finish`` ends a window now: all ranks have the mean of their weights.

Sources: Douillard et al. 2023, DiLoCo, arXiv:2311.08105; Douillard et al. 2025, Streaming DiLoCo, arXiv:2501.18512
(fragments, overlap, and the mean of both with alpha = 1/2); Stich 2019, Local SGD, arXiv:1805.09767.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.core import layout
from hvdkit.core.communicator import ALLGATHER, ALLREDUCE, ALLTOALL, Communicator
from hvdkit.core.compression import combine, new_packing
from hvdkit.errors import InvalidArgumentError, finite, whole
from hvdkit.steps import agreement, passes
from hvdkit.steps.gradients import COMPRESSIONS
from hvdkit.steps.topology import Topology

Array = npt.NDArray[Any]
_DEFAULTS = {"nesterov": (0.7, 0.9), "average": (1.0, 0.0)}
_COMPRESSIONS = [name for name in COMPRESSIONS if name != "auto"]  # a step's time does not tell of an outer step's
_FRAGMENT = 2**22  # numbers that are sent at once
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class OuterOptions:
    """When and how the groups' weights become one.

    Attributes:
        every: steps of the optimizer from one outer step to the next, >= 1.
        outer: "nesterov" or "average".
        lr, momentum: of the outer optimizer, lr > 0 and 0 <= momentum < 1; None: those of ``outer``, see the table.
        overlap: steps that are taken while a fragment travels, 0 <= overlap < every; 0: wait.
        compression: how differences travel, see ``GradientOptions``; over "bf16" and "fp16", too, parts are added up
            in float32.
        op: of the gradients within a group: "average" alone.
    Raises:
        InvalidArgumentError: an unknown name or a number out of range.
    """

    every: int
    outer: str = "nesterov"
    lr: float | None = None
    momentum: float | None = None
    overlap: int = 0
    compression: str = "none"
    op: str = "average"

    def __post_init__(self) -> None:
        if self.op != "average":
            raise InvalidArgumentError(f"every= averages, but op is {self.op!r}; use op='average'.")
        if self.outer not in _DEFAULTS:
            raise InvalidArgumentError(f"outer must be one of {', '.join(_DEFAULTS)}, got {self.outer!r}.")
        if self.compression not in _COMPRESSIONS:
            raise InvalidArgumentError(
                f"with every=, compression must be one of {', '.join(_COMPRESSIONS)}, got {self.compression!r}."
            )
        if self.outer == "average" and self.momentum not in (None, 0):
            raise InvalidArgumentError(
                f"outer='average' has no momentum, got outer_momentum={self.momentum!r}; use outer='nesterov'."
            )
        _, momentum = self.rates()
        if not 0 <= momentum < 1:
            raise InvalidArgumentError(f"outer_momentum must be in 0 .. 1, without 1, got {momentum}.")
        every, overlap = whole("every", self.every, 1), whole("outer_overlap", self.overlap, 0)
        if overlap >= every:
            raise InvalidArgumentError(
                f"outer_overlap={overlap} must be less than every={every}: a fragment is back before it leaves again."
            )
        object.__setattr__(self, "every", every)
        object.__setattr__(self, "overlap", overlap)

    def rates(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer optimizer."""
        usual_lr, usual_momentum = _DEFAULTS[self.outer]
        return (
            usual_lr if self.lr is None else finite("outer_lr", self.lr, positive=True),
            usual_momentum if self.momentum is None else finite("outer_momentum", self.momentum),
        )


def wanted(
    every: int | None,
    outer: str,
    lr: float | None,
    momentum: float | None,
    overlap: int,
    *,
    compression: str,
    op: str,
    process_set: Any,
) -> OuterOptions | None:
    """What the arguments of ``distribute`` ask for; None where they name no outer steps.

    Raises:
        InvalidArgumentError: see ``OuterOptions``; or arguments of outer steps without ``every``.
    """
    if every is not None:
        return OuterOptions(every, outer, lr, momentum, overlap, compression, op)
    theirs = {"outer": outer != "nesterov", "outer_lr": lr is not None, "outer_momentum": momentum is not None}
    theirs |= {"outer_overlap": overlap != 0, "process_set": isinstance(process_set, str)}
    given = [name for name, is_given in theirs.items() if is_given]
    if given:
        raise InvalidArgumentError(
            f"{' and '.join(given)} as given here belong to outer steps; add every=30 (docs/slow_networks.md), or "
            "leave them out."
        )
    return None


class Weights(ABC):
    """What an optimizer trains, as ``OuterLoop`` sees it."""

    rows: list[str]  # "name type shape" of each, the same on every rank
    sizes: list[int]  # numbers of each

    @abstractmethod
    def get(self, places: Sequence[int]) -> list[Array]:
        """Values of some, on the host, in any shape, in float32 or wider; they stay what they are."""

    @abstractmethod
    def put(self, places: Sequence[int], values: Sequence[Array]) -> None:
        """Set some; ``values`` are (size,) each, and their memory changes afterwards."""

    @abstractmethod
    def average_slots(self, mean: Callable[[Array], Array]) -> None:
        """Replace what the optimizer keeps of each weight, where it is floating point, by the ranks' mean of it."""


class OuterLoop:
    """Takes the outer steps of one optimizer. Every rank makes the same calls; ``finish`` waits for ranks behind.

    Args:
        options: see ``OuterOptions``.
        communicator: between all ranks.
        is_saved: whether checkpoints hold what it keeps.
    """

    def __init__(self, options: OuterOptions, communicator: Communicator, *, is_saved: bool = True) -> None:
        self.options, self._ranks = options, communicator
        self.weights: Any = None
        self._fragments: list[_Fragment] = []
        self._velocity: dict[str, Array] = {}
        self.name, self._pool = "", ThreadPoolExecutor(2, "hvdkit-outer")
        self._steps, self._met, self._size = 0, 0, 1
        if is_saved:
            _ALL.append(weakref.ref(self))

    def begin(self, weights: Weights) -> None:
        """Before the first step, and where others are trained than before: take the anchor. A collective.

        Raises:
            AgreementError: the ranks train different parameters, with other options, or from other values.
        """
        if self.weights is not None:
            self.finish()
            self.forget()
        values = weights.get(range(len(weights.sizes)))
        rows, digests = [*weights.rows, f"{self.options}"], [*agreement.array_digests(values), 0]
        agreement.require_same_values(self._ranks, rows, digests, lambda place: (_name_of(rows[place]), values[place]))
        self.name = self.name or f"hvdkit.outer.{next(_NUMBERS)}"
        kind = np.result_type(np.float32, *values)
        buckets = layout.in_buckets(
            [0] * len(values), weights.sizes, max(_FRAGMENT, sum(weights.sizes) // self.options.every)
        )
        self._fragments = []
        for number, places in enumerate(buckets):
            anchor = np.concatenate([values[place].reshape(-1) for place in places]).astype(kind)
            mean = _mean(self._ranks, f"{self.name}.{number}", len(anchor), self.options.compression, kind)
            offset = number * self.options.every // len(buckets) if self.options.overlap else 0
            velocity, difference = np.zeros_like(anchor), np.empty_like(anchor)
            self._fragments.append(_Fragment(places, offset, anchor, mean, velocity, difference))
        self._begin_velocity(weights)
        self._count = self._ranks.background(ALLREDUCE, f"{self.name}.word", _POLL_S)
        self.weights, self._size = weights, self._ranks.size()

    def _begin_velocity(self, weights: Weights) -> None:
        """That of the first rank on all: others may have joined, or it alone has read a checkpoint."""
        names = list(map(_name_of, weights.rows))
        for key, saved in () if self._velocity else list(_RESTORED.items()):
            if {name: value.size for name, value in saved.items()} == dict(zip(names, weights.sizes, strict=True)):
                self._velocity = _RESTORED.pop(key)
                break
        mine = [self._velocity.get(name, np.zeros(0)) for name in names]
        lengths = np.array([len(one) for one in mine], np.int64)
        theirs = self._ranks.broadcast(lengths, 0, f"{self.name}.begin")
        if not theirs.any():
            return
        flat = np.concatenate(mine) if (lengths == theirs).all() else np.zeros(theirs.sum())
        found = _split(self._ranks.broadcast(flat.astype(np.float64), 0, f"{self.name}.velocity"), theirs.tolist())
        for fragment in self._fragments:
            velocity = np.concatenate([found[place] for place in fragment.places])
            if len(velocity) == len(fragment.anchor):
                fragment.velocity = velocity.astype(fragment.anchor.dtype)

    def tick(self) -> tuple[int, bool]:
        """Count a step; its number, and whether ``take`` is to be called when it is done."""
        self._steps += 1
        if self.weights is None:
            return self._steps, self.options.every == 1
        return self._steps, any(
            self._leaves(one, self._steps) or self._returns(one, self._steps) for one in self._fragments
        )

    def _leaves(self, fragment: _Fragment, steps: int) -> bool:
        since = steps - self.options.every - fragment.offset
        return since >= 0 and since % self.options.every == 0

    def _returns(self, fragment: _Fragment, steps: int) -> bool:
        return self._leaves(fragment, steps - self.options.overlap)

    def take(self, steps: int) -> None:
        """After a step of this number: send what is due, and take in what is due to have come back."""
        for fragment in self._fragments:
            if self._leaves(fragment, steps):
                if fragment is self._fragments[0]:
                    self._say(finishing=False)
                self._launch(fragment)
        for fragment in self._fragments:
            if self._returns(fragment, steps):
                self._land(fragment)
                self._met = self._met if self.options.overlap else steps

    def finish(self) -> None:
        """End the window now: every rank has the mean of all ranks' weights; the outer momentum stays as it is.

        A collective. A rank that has taken fewer steps than others takes part in their outer steps with what it has,
        until all have called this.
        """
        if self.weights is None:
            return
        rounds = max(fragment.rounds for fragment in self._fragments)
        self._exchange([one for one in self._fragments if one.pending or one.rounds < rounds], rounds)
        while True:
            self._say(finishing=True)
            training, differ = self._word.result()
            if training or differ:
                rounds += 1
                self._exchange(self._fragments, rounds)
            if not training:
                break
        self._steps = self._met = 0

    def _exchange(self, fragments: Sequence[_Fragment], rounds: int) -> None:
        """Have these in so many rounds, and wait for them."""
        for fragment in fragments:
            if fragment.pending:
                self._land(fragment)
        behind = [fragment for fragment in fragments if fragment.rounds < rounds]
        for fragment in behind:
            self._launch(fragment)
        for fragment in behind:
            self._land(fragment)

    def _say(self, *, finishing: bool) -> None:
        """Tell the ranks, at the beginning of a round, whether this one trains on, and whether its weights differ."""
        self._word = self._pool.submit(self._count, np.array([not finishing, self._steps != self._met], np.float64))

    def _launch(self, fragment: _Fragment) -> None:
        if fragment.pending:  # a step that was interrupted has left it
            self._land(fragment)
        self._with_weights(fragment, fragment.difference, np.subtract)
        fragment.rounds += 1
        fragment.pending = self._pool.submit(fragment.mean, fragment.difference), self._word

    def _land(self, fragment: _Fragment) -> None:
        """Wait for a fragment, take the outer step with it, and have the weights follow."""
        pending, word = fragment.pending
        mean, fragment.pending = pending.result(), None
        training, _ = word.result()
        lr, momentum = self.options.rates() if training else (1.0, 0.0)
        for piece in _pieces(len(mean)):
            _step(fragment.anchor[piece], fragment.velocity[piece], mean[piece], lr, momentum)
        values = fragment.anchor
        if training and self.options.overlap:  # what was learned meanwhile counts as much
            values = mean
            self._with_weights(fragment, values, _between)
        self.weights.put(fragment.places, self._by_weight(fragment, values))

    def _with_weights(self, fragment: _Fragment, found: Array, compute: Callable[..., Any]) -> None:
        """``compute(anchor, weights, out=found)``, of each weight piece by piece."""
        rows = zip(
            self._by_weight(fragment, fragment.anchor),
            self.weights.get(fragment.places),
            self._by_weight(fragment, found),
            strict=True,
        )
        for anchor, weight, out in rows:
            flat = weight.reshape(-1)
            for piece in _pieces(len(out)):
                compute(anchor[piece], flat[piece], out=out[piece])

    def _by_weight(self, fragment: _Fragment, flat: Array) -> list[Array]:
        return _split(flat, [self.weights.sizes[place] for place in fragment.places])

    def average_slots(self) -> None:
        """Give every rank the mean of what the ranks' optimizers keep of each weight; a collective."""
        if self.weights is not None:
            size = self._ranks.size()
            self.weights.average_slots(lambda mine: self._ranks.allreduce(mine, f"{self.name}.slots") / size)

    def velocity(self) -> dict[str, Array]:
        """The outer momentum of each weight by its name, the same on every rank."""
        found = dict(self._velocity)
        for fragment in self._fragments:
            parts = self._by_weight(fragment, fragment.velocity)
            names = [_name_of(self.weights.rows[place]) for place in fragment.places]
            found.update((name, part.copy()) for name, part in zip(names, parts, strict=True))
        return found

    def forget(self, velocity: dict[str, Array] | None = None) -> None:
        """Begin anew with the next step: the ranks or the weights are others now; default: with this velocity."""
        self._velocity = self.velocity() if velocity is None else velocity
        self.weights, self._fragments, self._steps, self._met = None, [], 0, 0

    def lost(self) -> int:
        """Steps of this rank that no other one has learned of."""
        return self._steps - self._met if self._size > 1 else 0


@dataclass(slots=True)
class _Fragment:
    """Some of the weights, which are sent at once."""

    places: list[int]
    offset: int  # steps from the beginning of a window until it leaves
    anchor: Array  # the weights of the last outer step, one after another
    mean: Callable[[Array], Array]  # of all ranks' differences; for a second thread
    velocity: Array  # of the outer optimizer
    difference: Array  # the memory of what is sent
    rounds: int = 0  # in which it was sent
    pending: Any = None  # the mean on its way, and what the ranks say of this round


def _pieces(length: int) -> list[slice]:
    """Of a flat array, in order: what is computed of one stays in a core's cache, and needs no new memory."""
    return [slice(start, start + agreement.CHUNK) for start in range(0, length, agreement.CHUNK)]


def _step(anchor: Array, velocity: Array, mean: Array, lr: float, momentum: float) -> None:
    """The outer optimizer's, in place; ``mean`` is lost."""
    if momentum:
        velocity *= momentum
        velocity += mean
        anchor -= lr * momentum * velocity
    mean *= lr
    anchor -= mean


def _between(anchor: Array, weight: Array, out: Array) -> None:
    np.add(weight, anchor, out=out)
    out /= 2


def _split(flat: Array, sizes: Sequence[int]) -> list[Array]:
    return np.split(flat, np.cumsum(sizes)[:-1])


def _name_of(row: str) -> str:
    return row.split(" ")[0]


def _mean(ranks: Communicator, name: str, length: int, compression: str, kind: Any) -> Callable[[Array], Array]:
    """The mean of all ranks' vectors, (length,), for a second thread; made on all ranks."""
    size = ranks.size()
    if compression == "none":
        total = ranks.background(ALLREDUCE, name, _POLL_S)

        def mean_of_all(mine: Array) -> Array:
            found = total(mine)
            found /= size
            return found

        return mean_of_all
    packing = new_packing(compression, [(name, length)], ranks.rank(), size, dtype=kind, saves=True)
    calls = {
        collective: ranks.background(collective, f"{name}.{end}", _POLL_S)
        for collective, end in ((ALLTOALL, "parts"), (ALLGATHER, "mean"))
    }

    def packed_mean(mine: Array) -> Array:
        combine(lambda collective, array, _: calls[collective](array), packing, mine, name, 1 / size)
        return mine

    return packed_mean


# The groups within which gradients are averaged in each step ---------------------------------------------------------

ALONE = SimpleNamespace(process_set_id=-1, ranks=[], included=lambda: False, size=lambda: 1, rank=lambda: 0)
"""In the place of Horovod's process set for a rank that is a group of its own."""
_HOSTS: dict[tuple[int, ...], Any] = {}
"""Horovod's process set of each host's ranks: it makes one of the same ranks only once."""


def group_of(world: Topology, ranks: Communicator, process_set: Any, horovod: Any = None) -> Any:
    """Horovod's process set in which gradients are averaged in each step, or ``ALONE``; a collective.

    Args:
        world, ranks: the job.
        horovod: Horovod's module for a framework; None where there is mpi4py alone.
        process_set: one of Horovod's; "rank": each rank is a group of its own; None: the ranks of a host are one.
    Raises:
        InvalidArgumentError: the hosts have several ranks each, and Horovod takes no new process sets.
    """
    if isinstance(process_set, str) and process_set != "rank":
        raise InvalidArgumentError(f"process_set must be 'rank' or a ProcessSet of Horovod's, got {process_set!r}.")
    if process_set == "rank" or world.size == 1:
        return ALONE
    if process_set is not None:
        return process_set
    hosts = np.stack(ranks.allgather(np.array([world.cross_rank, world.local_size]), "hvdkit.outer.hosts"))
    groups = [np.flatnonzero(hosts[:, 0] == host).tolist() for host in np.unique(hosts[:, 0])]
    largest = hosts[:, 1].max()
    if largest == 1:
        return ALONE
    if len(groups) == 1 and horovod is not None:
        return horovod.global_process_set
    if horovod is None:
        raise InvalidArgumentError(
            f"every= averages gradients within each host, a host has {largest} ranks, and this process has mpi4py "
            "alone; give process_set='rank' (each rank trains on its own between outer steps), or install Horovod."
        )
    if (hosts[:, 1] != largest).any() or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") in ("", "0"):
        raise InvalidArgumentError(
            f"every= averages gradients within each host, and a host has {largest} ranks: Horovod needs a process set "
            "for each. Where all hosts have as many ranks, hvdkit makes them: start with "
            "`hvdkit launch --env HOROVOD_DYNAMIC_PROCESS_SETS=1`. Else give your own as process_set=, or "
            "process_set='rank': each rank trains on its own between outer steps."
        )
    for group in map(tuple, groups):
        if getattr(_HOSTS.get(group), "process_set_id", None) is None:  # not made yet, or Horovod has started anew
            _HOSTS[group] = horovod.add_process_set(list(group))
    return next(_HOSTS[group] for group in map(tuple, groups) if world.rank in group)


# Of all optimizers ----------------------------------------------------------------------------------------------------

_NUMBERS = itertools.count()
_ALL: list[weakref.ref[OuterLoop]] = []
_RESTORED: dict[str, dict[str, Array]] = {}
"""From a checkpoint, until an optimizer begins that trains weights of these names and sizes: their velocity."""


def living() -> list[OuterLoop]:
    """Those in use whose windows have begun, in the order in which they were made."""
    return [one for held in _ALL if (one := held()) is not None and one.weights is not None]


def _in_use() -> list[OuterLoop]:
    """As ``living``, the same on every rank: none that only waits to be freed, as each rank does at its own time."""
    if living():
        gc.collect()
    return living()


def to_save() -> dict[str, Array]:
    """End every window, for a checkpoint; what the outer optimizers keep. A collective.

    The optimizers within the groups get the mean of what they keep: a training goes on from the checkpoint as this one
    does, on any number of ranks.
    """
    saved: dict[str, Array] = {}
    for number, one in enumerate(_in_use()):
        one.finish()
        one.average_slots()
        saved.update({f"{number} {name}": value for name, value in one.velocity().items()})
    return saved


def restore(saved: dict[str, Array]) -> None:
    """Go on with what ``to_save`` returned; only the first rank needs to have it."""
    forget({})
    _RESTORED.clear()
    for key, value in saved.items():
        number, _, name = key.partition(" ")
        _RESTORED.setdefault(number, {})[name] = value


def average_weights() -> None:
    """End the windows of ``distribute(every=...)`` now: every rank has the mean of all ranks' weights, bit for bit.

    A collective. Call it before weights are evaluated or used, and at the end of the training; ``Checkpoints.save``
    does so itself. A rank that has taken fewer steps waits here, and takes part in the outer steps of the others.

    Raises:
        InvalidArgumentError: no optimizer was distributed with ``every=``.
    """
    if not _ALL:
        raise InvalidArgumentError("average_weights ends windows of distribute(every=...), and no optimizer has any.")
    end_windows()


def end_windows() -> None:
    """As ``average_weights``, also where no optimizer has windows."""
    passes.wait_for_steps()
    for one in _in_use():
        one.finish()


def forget(velocity: dict[str, Array] | None = None) -> None:
    """The ranks, or the weights, are others now, and what was on its way is lost; see ``OuterLoop.forget``."""
    for one in living():
        one.forget(velocity)


@atexit.register
def _say_what_is_lost() -> None:
    steps = max((one.lost() for one in living()), default=0)
    if steps and not hasattr(sys, "last_value"):
        warnings.warn(
            f"the last {steps} steps were learned by this rank's group alone: with every= the ranks' weights differ "
            "between outer steps. Call average_weights() at the end of the training, before weights are used.",
            stacklevel=1,
        )
