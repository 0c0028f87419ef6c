"""Gradients that are the mean over the ranks when ``backward()`` returns; the inside of ``hvdkit.torch.distribute``.

A hook on every parameter puts its fresh gradient into a bucket, which travels while backward computes others. A
callback at the end of backward sends the rest and waits, so that whatever reads gradients after it (clipping, a
GradScaler, a closure, the step) sees the mean. The optimizer stays the user's own object.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import agreement, step_times
from hvdkit.steps.collectives import OverHorovod
from hvdkit.steps.gradients import GradientOptions
from hvdkit.torch.buckets import Named, Parameter, Travelling, Wire, in_buckets
from hvdkit.torch.state import layout, plain_name

_EXCHANGES: weakref.WeakSet[Exchange] = weakref.WeakSet()
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Layout:
    """How gradients are put into buckets; see ``hvdkit.torch.distribute``."""

    bucket_mb: float = 4
    groups: int | list[list[torch.Tensor]] | None = None
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        size = self.bucket_mb
        if isinstance(size, bool) or not (isinstance(size, int | float) and math.isfinite(size) and size > 0):
            raise InvalidArgumentError(f"bucket_mb must be a positive, finite number of MB, got {size!r}.")
        groups = self.groups
        if isinstance(groups, list):
            members = [one for group in groups for one in group]
            if not all(isinstance(one, torch.Tensor) for one in members):
                raise InvalidArgumentError("groups must be a number, or lists of parameters.")
            if len({id(one) for one in members}) < len(members):
                raise InvalidArgumentError("a parameter stands twice in groups; each may be in one.")
        elif groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
            raise InvalidArgumentError(f"groups must be a number >= 1 or lists of parameters, got {groups!r}.")


def distributed(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    options: GradientOptions,
    layout: Layout,
    process_set: Any,
) -> torch.optim.Optimizer:
    """The inside of ``hvdkit.torch.distribute``, which says what is taken and refused."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(f"distribute takes a torch.optim optimizer, got {type(optimizer).__name__}.")
    if type(optimizer).__module__ == hvd.DistributedOptimizer.__module__ or any(
        one.optimizer() is optimizer for one in _EXCHANGES
    ):
        raise InvalidArgumentError(
            "this optimizer is distributed already; call distribute once, its gradients are averaged."
        )
    names = {id(parameter): name for name, parameter in _named(model)}
    named = [(names.get(id(one), ""), one) for one in _parameters(optimizer)]
    missing = [one for name, one in named if not name]
    if missing:
        raise InvalidArgumentError(
            f"the optimizer holds {len(named)} parameters, {len(named) - len(missing)} of them in the model; make the "
            "optimizer from this model's parameters(), after moving the model to its device."
        )
    for name, one in named:
        require_sendable(name, one)
    ranks = hvd.global_process_set if process_set is None else process_set
    if hvd.size() > 1:  # else Horovod leaves Adasum out
        options.require_possible(ranks.size(), all_ranks=ranks.process_set_id == 0, over_mpi=hvd.mpi_enabled())
    if options.op == "adasum":
        return _adasum(optimizer, named, options)
    Exchange(optimizer, model, options, layout, ranks)
    return optimizer


def require_sendable(name: str, parameter: Parameter) -> None:
    """Refuse a parameter whose gradient cannot travel.

    Raises:
        InvalidArgumentError: it has no data yet, is no plain dense tensor, or is on a device that Horovod cannot reach.
    """
    if torch.nn.parameter.is_lazy(parameter) or parameter.device.type == "meta":
        why, fix = "it has no data yet", "run one batch through the model, or materialize it, before distribute"
    elif parameter.layout != torch.strided or hasattr(parameter, "to_local"):  # a DTensor
        why = f"it is a {'DTensor' if hasattr(parameter, 'to_local') else parameter.layout}"
        fix = "distribute takes plain dense parameters, whole on every rank"
    elif parameter.device.type not in ("cpu", "cuda"):
        why, fix = (
            f"it is on {parameter.device}",
            "Horovod reduces on CPUs and on CUDA or ROCm GPUs: move the model there",
        )
    else:
        return
    raise InvalidArgumentError(f"the gradient of {name} cannot travel: {why}; {fix}.")


def _named(model: torch.nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Parameters by the names that they have in the model before it is compiled."""
    return ((plain_name(name), one) for name, one in model.named_parameters())


def _parameters(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    """All that it holds, each once, in the order of its groups."""
    every = {id(one): one for group in optimizer.param_groups for one in group["params"]}
    return list(every.values())


def _adasum(optimizer: torch.optim.Optimizer, named: Named, options: GradientOptions) -> torch.optim.Optimizer:
    """Horovod's own optimizer: Adasum combines what the ranks' optimizers would do, not their gradients."""
    made = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=named,
        compression=hvd.Compression.fp16 if options.compression == "fp16" else hvd.Compression.none,
        backward_passes_per_step=options.backward_passes_per_step,
        op=hvd.Adasum,
    )
    # Horovod makes a new optimizer from the parameter groups alone: defaults and state would be lost.
    made.defaults = optimizer.defaults
    made.state.update(optimizer.state)
    return cast(torch.optim.Optimizer, made)


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What all ranks train, and the buckets that were made of it.

    Attributes:
        seen: this rank's parameters when they agreed: what can change without a word.
    """

    seen: list[tuple[int, torch.dtype, int]]
    buckets: list[Travelling]
    bucket_of: dict[int, Travelling]


class Exchange:
    """What one ``distribute`` does to its parameters: after every backward that reaches them, ``.grad`` is the mean.

    Args:
        optimizer: whose parameters, those that it is given later included.
        model: names them.
        options, layout: how.
        ranks: Horovod's process set.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        options: GradientOptions,
        layout: Layout,
        ranks: Any,
    ) -> None:
        self.optimizer = weakref.ref(optimizer)  # parameters live longer than an optimizer, and hold their hooks
        self.number = next(_NUMBERS)
        self._options, self._layout, self._ranks = options, layout, ranks
        self._wire = Wire(ranks, options.compression, options.gradient_predivide_factor)
        self._names = {id(one): name for name, one in _named(model)}
        self._order = {key: place for place, key in enumerate(self._names)}
        self._sparse = {
            id(one)
            for module in model.modules()
            if getattr(module, "sparse", False)
            for one in module.parameters(False)
        }
        self._hooked: dict[int, tuple[Parameter, list[Any]]] = {}
        self._suspended = 0
        self._passes = 0
        self._twice: set[int] = set()
        self._local: list[tuple[Parameter, torch.Tensor, int]] = []
        self._agreed: _Agreed | None = None
        self.follow_groups()
        optimizer.register_step_pre_hook(self._before_step)
        added = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            added(param_group)
            self.follow_groups()

        optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
        _EXCHANGES.add(self)

    # Which parameters ----------------------------------------------------------------------------------------------

    def follow_groups(self) -> None:
        """Take part in the gradients of all parameters that the optimizer has now, also of those that do not train yet.

        The newest ``distribute`` of a parameter is the one that averages it.
        """
        optimizer = self.optimizer()
        for one in [] if optimizer is None else _parameters(optimizer):
            if id(one) in self._hooked or not (one.is_floating_point() or one.is_complex()):
                continue
            name = self._names.setdefault(id(one), f"added.{len(self._names)}")
            self._order.setdefault(id(one), len(self._order))
            require_sendable(name, one)
            for other in _EXCHANGES:
                other.release(one)
            self._hooked[id(one)] = one, self._hooks_on(one)

    def _hooks_on(self, parameter: Parameter) -> list[Any]:
        trains = parameter.requires_grad
        parameter.requires_grad_(True)  # hooks can be put only on what trains, and stay when it no longer does
        hooks = [parameter.register_post_accumulate_grad_hook(self._take)]  # type: ignore[no-untyped-call]
        if self._options.op == "sum":
            # The mean of n-fold gradients is their sum, and stays it when it is averaged again.
            hooks.append(parameter.register_hook(lambda one: one * self._ranks.size()))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trains)
        return hooks

    def release(self, parameter: Parameter) -> None:
        """Leave a parameter to another exchange."""
        for hook in self._hooked.pop(id(parameter), (parameter, []))[1]:
            hook.remove()

    def holds(self, model: torch.nn.Module) -> bool:
        """Whether it averages gradients of this model."""
        return any(id(one) in self._hooked for one in model.parameters())

    def _training(self) -> list[Parameter]:
        """What trains now, in the order of the model."""
        return sorted(
            (one for one, _ in self._hooked.values() if one.requires_grad), key=lambda one: self._order[id(one)]
        )

    # While backward computes ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first gradient of a backward is there."""
        self.active = self._ranks.included() and self._ranks.size() > 1
        self.follow_groups()
        passes = self._options.backward_passes_per_step
        self.exchanging = self.active and not self._suspended and (self._passes + 1) % passes == 0
        self._fired: set[int] = set()
        self._changed = self._agreed is None or self._agreed.seen != _seen(self._training())

    @torch.no_grad()
    def _take(self, parameter: Parameter) -> None:
        """A parameter's gradient is there: called by backward, once for each parameter, or again where it is nested."""
        _NOW.reach(self)
        if not self.exchanging:
            return
        if id(parameter) in self._fired:
            self._twice.add(id(parameter))
        self._fired.add(id(parameter))
        if self._agreed is None or self._changed:
            return
        bucket = self._agreed.bucket_of[id(parameter)]
        if id(parameter) in self._twice:
            bucket.early = False
        if bucket.take(parameter) and bucket.early:
            bucket.leave(self._wire, changed=False)

    # At the end of backward ----------------------------------------------------------------------------------------

    def depart(self) -> None:
        """Send what has not left yet."""
        if self.active:
            self._passes += not self._suspended
        if self.exchanging:
            self._passes, self._local = 0, []
            for bucket in self._buckets():
                bucket.leave(self._wire, self._changed)
        elif self.active:
            gradients = [(one, one.grad) for one in self._training()]
            self._local = [(one, gradient, gradient._version) for one, gradient in gradients if gradient is not None]

    def arrive(self) -> None:
        """Wait; then all gradients are the mean.

        Raises:
            AgreementError: the ranks train different parameters, or with other options; on every rank.
        """
        if not self.exchanging:
            return
        # All buckets, whatever they say: each is on its way.
        if self._agreed is not None and not any([bucket.arrive() for bucket in self._buckets()]):
            return
        self._agree()
        # What was averaged already averages to itself.
        for bucket in self._buckets():
            bucket.leave(self._wire, changed=False)
        for bucket in self._buckets():
            bucket.arrive()

    def _agree(self) -> None:
        """Make buckets of what trains, the same on every rank; a collective."""
        training, how = self._training(), self._layout
        named = [(self._names[id(one)], one) for one in training]
        rows = [f"{layout(name, one)} strides {one.stride()}" for name, one in named]
        rows.append(f"{self._options} in buckets of {how.bucket_mb} MB, sparse_as_dense={how.sparse_as_dense}")
        ranks = OverHorovod(hvd, torch.from_numpy, self._ranks)
        agreement.require_same_rows(ranks, rows, "train different parameters", "freeze and add them alike")
        # Ranks that came later have made fewer; the highest number is new on each of them.
        number = int(np.concatenate(ranks.gather(np.array([self.number]), "hvdkit.gradients.number")).max())
        buckets = in_buckets(named, how.bucket_mb, how.groups, how.sparse_as_dense, self._sparse)
        for bucket in buckets:
            bucket.name = f"gradients.{number}.{bucket.name}"
        bucket_of = {id(one): bucket for bucket in buckets for one in bucket.parameters}
        self._agreed = _Agreed(_seen(training), buckets, bucket_of)

    def _buckets(self) -> list[Travelling]:
        return [] if self._agreed is None else self._agreed.buckets

    def abandon(self) -> None:
        """An error ended backward, on every rank: what is on its way arrives, for nothing."""
        for bucket in self._buckets():
            bucket.abandon()

    def forget_agreement(self) -> None:
        """The ranks are others now, and what was on its way is lost."""
        self._agreed = None

    # Before a step -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Gradients of backwards in here stay this rank's own."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        """No step with gradients of one rank: exchange what no backward did, and average a closure's loss."""
        local = [(gradient, version) for one, gradient, version in self._local if one.grad is gradient]
        self._local = []
        if local and any(gradient._version != version for gradient, version in local):
            raise InvalidArgumentError(
                f"step() after gradients of this rank alone were changed (clipped or unscaled): the last backward "
                f"before it was in no_sync, or was one of fewer than {self._options.backward_passes_per_step} "
                "backward passes; leave no_sync, or backward_passes_per_step=1, for the last one."
            )
        if local:
            self.begin()
            self.exchanging = self.active
            self.depart()
            self.arrive()
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._averaging(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._averaging(kwargs["closure"])}
        return None

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that returns what the loss is on all ranks, on which a line search decides alike."""

        def averaged() -> Any:
            loss = closure()
            if loss is None or not (self._ranks.included() and self._ranks.size() > 1):
                return loss
            op = hvd.Sum if self._options.op == "sum" else hvd.Average
            mine = torch.as_tensor(loss).detach()
            whole = hvd.allreduce(mine.double(), name="hvdkit.loss", op=op, process_set=self._ranks)
            return whole.to(mine) if isinstance(loss, torch.Tensor) else whole.item()

        return averaged


def _seen(parameters: list[Parameter]) -> list[tuple[int, torch.dtype, int]]:
    return [(id(one), one.dtype, one.data_ptr()) for one in parameters]


class _Now:
    """The exchanges that the backward which runs now has reached; they end with it, together."""

    def __init__(self) -> None:
        self._reached: list[Exchange] = []
        self._tasks: set[int] = set()
        self._ends: weakref.WeakSet[_End] = weakref.WeakSet()

    def reach(self, exchange: Exchange) -> None:
        """Called in backward by every hook."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            if not self._ends:  # the graph that held them is gone: an error ended it
                self._abandon()
            self._tasks.add(task)
            self._queue_end()
        if exchange not in self._reached:
            self._reached.append(exchange)
            exchange.begin()

    def _queue_end(self) -> None:
        end = _End(self)
        self._ends.add(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _abandon(self) -> None:
        for exchange in self._reached:
            exchange.abandon()
        self._reached, self._tasks = [], set()

    @torch.no_grad()
    def end(self, end: _End) -> None:
        """The graph is done, or a graph within another: activation checkpointing calls backward within backward."""
        node = torch._C._current_autograd_node()
        if node is not None:
            self._end_with(node, end)
            return
        reached = sorted(self._reached, key=lambda one: one.number)
        self._reached, self._tasks = [], set()
        step_times.ready()
        # All depart before one is waited for: ranks may have reached them in another order.
        for exchange in reached:
            exchange.depart()
        for exchange in reached:
            exchange.arrive()

    def _end_with(self, node: Any, end: _End) -> None:
        """End with the graph of which ``node`` is computed now: a callback can be queued there by a node after it."""
        after = next(one for one, _ in node.next_functions if one is not None)

        def queue(_: Any, end: _End = end) -> None:  # noqa: ARG001  # ``end`` lives as long as there is something to come
            hook.remove()
            self._queue_end()

        hook = after.register_prehook(queue)


class _End:
    """What autograd calls at the end of a graph; it lives as long as that can still happen."""

    def __init__(self, now: _Now) -> None:
        self._now = now

    def __call__(self) -> None:
        self._now.end(self)


_NOW = _Now()


@contextlib.contextmanager
def unsynchronized(model: torch.nn.Module) -> Iterator[None]:
    """The inside of ``hvdkit.torch.no_sync``."""
    found = [one for one in _EXCHANGES if one.holds(model)]
    if not found:
        raise InvalidArgumentError("no_sync takes a model whose optimizer distribute has got; this one has none.")
    with contextlib.ExitStack() as stack:
        for one in found:
            stack.enter_context(one.suspended())
        yield


def forget_agreements() -> None:
    """Called when Horovod has started anew with other ranks."""
    for one in _EXCHANGES:
        one.forget_agreement()
