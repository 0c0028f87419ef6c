"""What one ``distribute`` does: hooks on parameters, buckets that the ranks agree on, and a look before each step."""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from hvdkit.core import layout as core_layout
from hvdkit.core.compression import CompressionTrial, kinds_of
from hvdkit.core.layout import NO_FLAGS, Flags, joined, said_by_some
from hvdkit.errors import AgreementError, InvalidArgumentError
from hvdkit.steps import agreement
from hvdkit.steps.divergence import DivergenceCheck, next_due
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.torch_tensors import sends_bfloat16
from hvdkit.torch import divergence, private
from hvdkit.torch.backward import TRACKER, exchange_all, exchanges, hold, tell_how_many
from hvdkit.torch.buckets import Bucket, BucketLayout, Named, Parameter, Reducer, obstacle_to, total_norm
from hvdkit.torch.sparse import AnyBucket, SparseGradient
from hvdkit.torch.state import TorchRanks, layout, parameters_of, plain_name

_NUMBERS = itertools.count()
_REQUIRES_GRAD, _SHAPE = operator.attrgetter("requires_grad"), operator.attrgetter("shape")


def named_of(model: torch.nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Parameters by the names that they have in the model before it is compiled."""
    return ((plain_name(name), one) for name, one in model.named_parameters())


def of_sparse_modules(model: torch.nn.Module) -> Iterator[Parameter]:
    """Parameters whose gradients are sparse."""
    return (
        one
        for module in model.modules()
        if getattr(module, "sparse", False)
        for one in module.parameters(recurse=False)
    )


def in_buckets(named: Named, layout: BucketLayout, sparse: set[int]) -> list[AnyBucket]:
    """Buckets of parameters that train, at least one; ``sparse``: the ids of those whose gradient is sparse."""
    travel_alone = [] if layout.sparse_as_dense else [each for each in named if id(each[1]) in sparse]
    alone = {id(parameter) for _, parameter in travel_alone}
    dense = [each for each in named if id(each[1]) not in alone]
    made: list[AnyBucket] = [SparseGradient(*each) for each in travel_alone]
    made += [Bucket(members, layout.sparse_as_dense) for members in layout.split(dense)]
    return made if any(isinstance(bucket, Bucket) for bucket in made) else [*made, Bucket([], layout.sparse_as_dense)]


class _Agreed:
    """What all ranks train, and the buckets that were made of it; ``number`` is the same on every rank."""

    def __init__(self, named: Named, number: int, buckets: list[AnyBucket]) -> None:
        self.number, self.buckets = number, buckets
        self._members = [(name, weakref.ref(parameter)) for name, parameter in named]
        self._kinds = self._kinds_of(named)

    @staticmethod
    def _kinds_of(named: Named) -> list[Any]:
        return [(one.dtype, one.device, one.shape, one.stride()) for _, one in named]

    def living(self) -> list[tuple[str, Parameter]]:
        """Parameters that are still in use, with their names."""
        return [(name, one) for name, weak in self._members if (one := weak()) is not None]

    def is_of(self, named: Named) -> bool:
        """Whether these are the same; another parameter may have the id of one that is gone."""
        same = len(self._members) == len(named)
        same = same and all(weak() is one for (_, weak), (_, one) in zip(self._members, named, strict=True))
        return same and self._kinds_of(named) == self._kinds


@dataclass(frozen=True, slots=True)
class _Member:
    """A parameter of an exchange, which its hooks hold: it must not hold them, or neither would ever be freed."""

    parameter: weakref.ref[Parameter]
    name: str
    order: int  # in the model
    sparse: bool  # its module says that its gradient is
    hooks: list[Any]  # handles; the first is of the one that says that its gradient is there


class Exchange:
    """What one ``distribute`` does to its parameters: after every backward that reaches them, ``.grad`` is the mean.

    Attributes:
        number: in the order in which the program has made them.
        place: how many of this process set were made before it.
        exchanging: whether gradients travel, since it has begun.
    """

    def __init__(
        self, optimizer: Optimizer, model: torch.nn.Module, options: GradientOptions, layout: BucketLayout, ranks: Any
    ) -> None:
        self.optimizer = weakref.ref(optimizer)  # parameters live longer than an optimizer, and hold their hooks
        self._model = weakref.ref(model)
        self.number = next(_NUMBERS)
        self._options, self._layout, self.process_set = options, layout, ranks
        self._reducer = Reducer(ranks, options.compression, options.gradient_predivide_factor)
        self._trial: CompressionTrial | None = None
        self._members: dict[int, _Member] = {}
        self._followed: list[weakref.ref[Parameter]] = []
        self._suspended = 0
        self._passes = 0
        self._task = -1
        self._fired: list[int] = []
        self._twice: set[int] = set()
        self._local: list[tuple[weakref.ref[Parameter], torch.Tensor, int]] = []
        self._agreed: _Agreed | None = None
        self._averaged = False
        self._untrained = divergence.untrained_of(model)
        self._divergence = DivergenceCheck(self._untrained)
        self._by_hand, self._asked = divergence.ByHand(), 0
        self._clipped = divergence.Clipped()
        self._within, self._backwards, self._next_look = divergence.Within(), 0, 1
        self.follow_groups()
        # What no optimizer has counts where the norm of the model's gradients is taken.
        others = (one for one in model.parameters() if not any(other.has(one) for other in exchanges()))
        self._register(one for one in others if obstacle_to(one) is None)
        added = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            added(param_group)
            self.follow_groups()

        optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
        self.place = hold(self)

    # Which parameters ----------------------------------------------------------------------------------------------

    def follow_groups(self) -> None:
        """Take part in the gradients of all parameters that the optimizer has now, also of those that do not train yet.

        The newest ``distribute`` of a parameter is the one that averages it.
        """
        optimizer = self.optimizer()
        held = [] if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]
        if len(held) != len(self._followed) or not all(map(operator.is_, held, [weak() for weak in self._followed])):
            self._register(held)
            self._followed = list(map(weakref.ref, held))

    def _register(self, parameters: Iterable[Parameter]) -> None:
        """Average the gradients of those parameters that are new, and can have one."""
        found = {id(one): one for one in parameters if not self.has(one)}
        new = [one for one in found.values() if one.is_floating_point() or one.is_complex()]
        if not new:
            return
        model = self._model()
        named = [] if model is None else list(named_of(model))
        places = {id(one): (name, place) for place, (name, one) in enumerate(named)}
        sparse = {id(one) for one in of_sparse_modules(model)} if model else set()
        for one in new:
            later = len(places) + len(self._members)
            name, order = places.get(id(one), (f"added.{later}", later))
            obstacle = obstacle_to(one)
            if obstacle is not None:
                raise InvalidArgumentError(f"the gradient of {name} cannot travel: {obstacle}")
            for other in exchanges():
                other.release(one)
            hooks = self._hooks_on(one)
            self._members[id(one)] = _Member(weakref.ref(one), name, order, id(one) in sparse, hooks)
        self._members = dict(sorted(self._members.items(), key=lambda member: member[1].order))
        self._look_anew()

    def has(self, parameter: Parameter) -> bool:
        """Whether it averages this parameter's gradient."""
        member = self._members.get(id(parameter))
        return member is not None and member.parameter() is parameter

    def _hooks_on(self, parameter: Parameter) -> list[Any]:
        trains = parameter.requires_grad
        parameter.requires_grad_(True)  # hooks can be put only on what trains, and stay when it no longer does
        hooks = [parameter.register_post_accumulate_grad_hook(self._hook_of(None))]  # type: ignore[no-untyped-call]
        if not self._members:
            held = weakref.ref(parameter)
            asked = private.eagerly(lambda _: self._see_gradient(held()))
            hooks.append(parameter.register_hook(asked))  # type: ignore[no-untyped-call]
        if self._options.op == "sum":

            def times_ranks(gradient: torch.Tensor) -> torch.Tensor:
                return gradient * self.process_set.size() if self._among_others() else gradient

            # The mean of n-fold gradients is their sum, and stays it when it is averaged again.
            hooks.append(parameter.register_hook(times_ranks))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trains)
        return hooks

    def _see_gradient(self, parameter: Parameter | None) -> None:
        """Every gradient of one parameter, also of ``torch.autograd.grad``; the first is that of a backward."""
        self._asked += 1
        if self._asked > 1 and self._among_others():
            self._by_hand.look(parameter, first=self._asked == 2)

    def release(self, parameter: Parameter) -> None:
        """Leave a parameter to another exchange."""
        if self.has(parameter):
            for hook in self._members.pop(id(parameter)).hooks:
                hook.remove()
            self._look_anew()

    def _look_anew(self) -> None:
        """The members are others now."""
        self._references = [member.parameter for member in self._members.values()]
        self._seen: list[list[Any]] = []

    def training(self) -> list[tuple[str, Parameter]]:
        """What trains now, with names, in the order of the model."""
        living = ((member.name, member.parameter()) for member in self._members.values())
        return [(name, one) for name, one in living if one is not None and one.requires_grad]

    # While backward computes ---------------------------------------------------------------------------------------

    def begin(self, late: bool = False) -> None:
        """The first gradient of a backward is there; ``late``: none was, and a step is about to be taken."""
        self.active = self._among_others()
        self._asked = 0
        if self.active and not late:
            divergence.UNDISTRIBUTED.exchanges += 1
            if divergence.COPIES.found:
                divergence.COPIES.tell()
            self._within.watched = []  # an error may have ended the last one
            self._backwards += 1
            if self._backwards >= self._next_look:
                self._next_look = next_due(self._backwards)
                self._within.begin(divergence.own(self.training(), self.optimizer()))
        self.follow_groups()
        passes = self._options.backward_passes_per_step
        self.exchanging = self.active and not self._suspended and (self._passes + 1) % passes == 0
        if self.exchanging:
            self._local = []  # a gradient that is held here looks like the program's own
            if self._trial is not None:
                self._trial.begin()
                self._reducer.compression = self._trial.kind
        self._fired.clear()
        for bucket in self._buckets():
            bucket.arrived.clear()
        has_fingerprint = self._divergence.pending_fingerprint is not None
        self._flags = Flags(changed=self._has_changed(), late=late, has_fingerprint=has_fingerprint)

    def _has_changed(self) -> bool:
        """Whether there are no buckets for what trains now; most often told by what takes little time to look at."""
        if self._agreed is None:
            return True
        living: list[Any] = [weak() for weak in self._references]
        if any(map(operator.is_, living, itertools.repeat(None))):
            return True
        # Where their numbers are tells of another type, device or order in memory.
        looks = (_REQUIRES_GRAD, torch.Tensor.data_ptr, _SHAPE)
        seen = [list(map(look, living)) for look in looks]
        if seen != self._seen and not self._agreed.is_of(self.training()):
            return True
        self._seen = seen  # wherever their numbers are by now (``p.data = p.data.clamp(-1, 1)``)
        return False

    def _among_others(self) -> bool:
        return bool(self.process_set.included() and self.process_set.size() > 1)

    def _hook_of(self, bucket: AnyBucket | None) -> Callable[[torch.Tensor], None]:
        """What autograd calls when a gradient of this bucket, or of none yet, is there; again, where graphs are nested.

        Autograd calls it for each parameter in each backward: it does no more than it must.
        """
        current_task, fired = private.current_graph_task, self._fired.append

        def is_there(parameter: torch.Tensor) -> None:
            if current_task() != self._task:
                self._task = TRACKER.mark_ready(self, parameter)
            fired(id(parameter))

        if bucket is None:
            return private.eagerly(is_there)
        arrived, size, on_gpu = bucket.arrived, len(bucket.param_ids), bucket.on_gpu

        def is_there_in_bucket(parameter: torch.Tensor) -> None:
            if current_task() != self._task:
                self._task = TRACKER.mark_ready(self, parameter)
            key = id(parameter)
            fired(key)
            arrived.append(key)
            if on_gpu:
                bucket.note_stream()
            if len(arrived) >= size and self.exchanging and not self._flags.changed and bucket.is_complete():
                bucket.launch(self._reducer, self._flags)

        return private.eagerly(is_there_in_bucket)

    # At the end of backward ----------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Send what has not left yet."""
        if self.active:
            self._passes += not self._suspended
        self._averaged, self._task = self.exchanging, -1
        if self.exchanging:
            self._passes, self._local = 0, []
            for bucket in self._buckets():
                bucket.launch(self._reducer, self._flags)
        elif self.active:
            gradients = [(weakref.ref(one), one.grad) for _, one in self.training()]
            self._local = [(one, gradient, gradient._version) for one, gradient in gradients if gradient is not None]

    def send_empty(self) -> None:
        """Say in what has not left yet that an error ended this rank's backward."""
        if self.exchanging:
            self._passes, self._local = 0, []
            for bucket in self._buckets():
                if not bucket.in_flight():
                    bucket.send_empty(self._reducer, self._flags._replace(failed=1))

    def finish(self, flags: Flags) -> None:
        """All have arrived, and the ranks say so much; then all gradients are the mean."""
        if self._within.watched:
            self._within.end()
        if not self.exchanging:
            return
        if flags.has_fingerprint and self._agreed is not None:  # also where they train others from now on
            named = divergence.own(self._agreed.living(), self.optimizer())
            names, roundings = [name for name, _ in named], [divergence.rounding_of(one) for _, one in named]
            call = f"parameters.{self._agreed.number}"
            self._divergence.compare(TorchRanks(self.process_set), names, roundings, call)
        if flags.changed or self._agreed is None:
            self._agree()
            # What was averaged already averages to itself.
            for bucket in self._buckets():
                bucket.launch(self._reducer, self._flags._replace(changed=0))
            flags = self.wait_all()
        elif self._trial is not None and self._trial.end_on(TorchRanks(self.process_set)):
            self._reducer.compression, self._trial = self._trial.kind, None
            for bucket in self._buckets():
                if self._reducer.compression != "int8" and isinstance(bucket, Bucket):
                    bucket.packings = ()
        self._divergence.exchanges += 1
        if self._divergence.exchanges >= self._divergence.due:
            self._divergence.ask()
        if flags.late and said_by_some(flags.late, self.process_set.size()):
            raise AgreementError(
                "some ranks call step() without a backward() that reaches this optimizer's parameters, and would not "
                "clip what the others clip; call it on every rank, with 0 * output.sum() where there is no loss."
            )

    def wait_all(self) -> Flags:
        """Wait for all buckets; how many ranks say what in them."""
        self._reducer.go_on(wait=True)
        found = [flags for bucket in self._buckets() if bucket.in_flight() and any(flags := bucket.finish())]
        return joined(found) if found else NO_FLAGS

    def _agree(self) -> None:
        """Make buckets of what trains, the same on every rank; a collective."""
        named, how = self.training(), self._layout
        sparse = {key for key, member in self._members.items() if member.sparse}
        rows = [f"{layout(name, one)} strides {one.stride()}" for name, one in named]
        rows.append(f"{self._options} in buckets of {how.bucket_mb} MB, sparse_as_dense={how.sparse_as_dense}")
        ranks = TorchRanks(self.process_set)
        devices = {one.device.type for _, one in named}
        adds_bfloat16 = all(sends_bfloat16(kind, self.process_set.size()) for kind in devices)
        kinds = kinds_of(bfloat16=adds_bfloat16) if self._options.compression == "auto" else ()
        rows.append(f"tries {kinds}")
        agreement.require_same_rows(ranks, rows, "train different parameters", "freeze and add them alike")
        # Ranks that came later have made fewer; the highest number is new on each of them.
        number = tell_how_many(ranks, self.process_set, self.number)
        # As this backward produced the gradients on the first rank; those without one there follow, last layer first.
        arrived = {key: place for place, key in enumerate(self._fired)}
        mine = core_layout.by_arrival(arrived, [id(parameter) for _, parameter in named])
        of_each_rank = ranks.allgather(np.array(mine, dtype=np.int64), "hvdkit.arrival")
        buckets = in_buckets([named[place] for place in core_layout.sorted_alike(of_each_rank)], how, sparse)
        if kinds and self._agreed is None:
            self._trial = CompressionTrial(kinds)
            self._reducer.compression = self._trial.kind
        packs = self._trial is not None or self._reducer.compression == "int8"
        for bucket in buckets:
            bucket.name = f"gradients.{number}.{bucket.name}"
            if packs and isinstance(bucket, Bucket):
                bucket.pack(number, self.process_set)
        self._twice.update(key for key, times in Counter(self._fired).items() if times > 1)
        self._twice.update(key for bucket in self._buckets() if not bucket.leaves_early for key in bucket.param_ids)
        hooks: dict[int, Callable[[torch.Tensor], None]] = {}
        for bucket in buckets:
            bucket.leaves_early = self._twice.isdisjoint(bucket.param_ids)
            hooks.update(dict.fromkeys(bucket.param_ids, self._hook_of(bucket)))
        self._members = {key: member for key, member in self._members.items() if member.parameter() is not None}
        of_no_bucket = self._hook_of(None)
        for key, member in self._members.items():
            private.put_hook(member.hooks[0], hooks.get(key, of_no_bucket))
        if self._agreed is None:
            self._divergence = DivergenceCheck(self._untrained)
        self._agreed = _Agreed(named, number, buckets)
        self._look_anew()
        self._flags = self._flags._replace(has_fingerprint=0)

    def _buckets(self) -> list[AnyBucket]:
        return [] if self._agreed is None else self._agreed.buckets

    def norm(self) -> torch.Tensor:
        """Of the gradients that are there, a scalar, where the first of them is."""
        gradients = [one.grad for _, one in self.training() if one.grad is not None]
        # Of a sparse one its rows alone: the whole may not fit into memory.
        return total_norm([one.coalesce().values() if one.is_sparse else one for one in gradients])

    def in_flight(self) -> bool:
        return any(bucket.in_flight() for bucket in self._buckets())

    def reset(self) -> None:
        """An error ended backward, before anything was sent."""
        for bucket in self._buckets():
            bucket.begin()

    def forget_agreement(self) -> None:
        """The ranks are others now, and what was on its way is lost."""
        self._agreed, self._passes, self._local, self._averaged = None, 0, [], False
        self._reducer.forget()

    # Before a step -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Gradients of backwards in here stay this rank's own."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def step_by(self, optimizer: Any) -> None:
        """An optimizer is about to step: its own, or another that has some of its parameters, such as one within it."""
        mine, within = self.steps_as(optimizer), private.current_graph_task() != -1
        if not mine and not ((within or self._local) and any(map(self.has, parameters_of(optimizer)))):
            return
        if within and self._among_others():
            raise InvalidArgumentError(
                "step() within backward(), where gradients are this rank's own and the mean is not there yet; step "
                "after backward()."
            )
        if any(divergence.is_other(one(), gradient, version) for one, gradient, version in self._local):
            raise InvalidArgumentError(
                f"step() after gradients of this rank alone were changed (clipped or unscaled): the last backward "
                f"before it was in no_sync, or was one of fewer than {self._options.backward_passes_per_step} "
                "backward passes; leave no_sync, or backward_passes_per_step=1, for the last one."
            )
        if self._members and not self._averaged:
            if not self._local and self._among_others():
                self._clipped.look([one.grad for _, one in self.training() if one.grad is not None])
            self.begin(late=True)
            self.exchanging = self.active
            exchange_all([self])
        self._averaged = True

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped; until then a step within its own (``super().step()``) exchanges nothing again."""
        self._averaged = self._averaged and not self.steps_as(optimizer)

    def steps_as(self, optimizer: Any) -> bool:
        """Whether an optimizer is its own, or within its own, which never called ``Optimizer.__init__`` (Lookahead)."""
        own = self.optimizer()
        if own is None or own is optimizer or hasattr(type(own).step, "hooked"):
            return own is optimizer
        # Its groups may be others: load_state_dict makes the inner one new ones.
        return set(map(id, parameters_of(own))) == set(map(id, parameters_of(optimizer)))

    def take_fingerprint(self, optimizer: Any) -> None:
        """Look at the parameters before a step of its own, when it is time to."""
        agreed, check = self._agreed, self._divergence
        wants = agreed is not None and check.asks and check.pending_fingerprint is None
        if agreed and wants and self.steps_as(optimizer) and divergence.can_look():
            named = divergence.own(agreed.living(), self.optimizer())
            check.pending_fingerprint = divergence.fingerprints(parameter for _, parameter in named)
            check.seen = divergence.look(self._model())

    def averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that returns what the loss is on all ranks, on which a line search decides alike."""

        def averaged() -> Any:
            loss = closure()
            if loss is None or not self._among_others():
                return loss
            op = hvd.Sum if self._options.op == "sum" else hvd.Average
            mine = torch.as_tensor(loss).detach()
            whole = hvd.allreduce(mine.double(), name="hvdkit.loss", op=op, process_set=self.process_set)
            return whole.to(mine) if isinstance(loss, torch.Tensor) else whole.item()

        return averaged
