"""How PyTorch's gradients lie side by side in memory and travel between ranks; used by ``exchange``.

A bucket is one flat tensor: gradients, whose ``.grad`` lie in its memory; behind them one number for each, 1 where this
rank has a gradient; and last this rank's ``BucketFlags``. After the allreduce these numbers are known on every rank,
at the cost of no collective of their own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from horovod.torch.mpi_ops import synchronize  # the one of ``hvd`` is a range of its own where a profile is made

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import step_times
from hvdkit.torch.bucket_layout import BucketFlags, BucketLayout, Named, Parameter, strides
from hvdkit.torch.reducer import REDUCED, Reducer, SparseGradient

FUSION_BYTES = 4 * 2**20
"""Of Horovod's fusion buffer. Two full buckets do not fit into it, so that Horovod copies neither."""
_HUGE_PAGE = 2**21
_New = tuple[int, Parameter, torch.Tensor]  # a place, whose it is, and its gradient


def _zeros(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of a bucket, on a CPU in huge pages where the kernel has them.

    Ranks of one host copy out of each other's memory, for which the kernel looks up page by page.
    """
    size = length * dtype.itemsize
    if device.type != "cpu" or size < _HUGE_PAGE // 4 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(length, dtype=dtype, device=device)
    whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE  # the kernel gives no huge page for a part of one
    memory = mmap.mmap(-1, whole + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).view(dtype)


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all numbers in some tensors, float32 ()."""
    half = (torch.float16, torch.bfloat16)
    types = [(one, torch.float32 if one.dtype in half else None) for one in tensors if one.numel()]
    norms = [torch.linalg.vector_norm(one, dtype=dtype).float() for one, dtype in types]
    if not norms:
        return torch.zeros(())
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]))
    return whole


def _owners(new: Iterable[_New]) -> list[tuple[int, int, int]]:
    """How many hold each gradient, in Python and as that of a tensor (0 before PyTorch 2.5), and its memory."""
    tensors = getattr(torch.Tensor, "_use_count", lambda _: 0)
    storages = ((one, one.untyped_storage()) for _, _, one in new)
    return [(sys.getrefcount(one), tensors(one), torch._C._storage_Use_Count(its._cdata)) for one, its in storages]


@functools.cache
def _owners_of_a_fresh_one() -> tuple[int, int, int]:
    probe = torch.nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    return _owners([(0, probe, probe.grad)])[0]


class AnyBucket(Protocol):
    """Gradients that leave together."""

    name: str
    param_ids: list[int]
    early: bool

    def mark_ready(self, parameter: Parameter) -> bool: ...
    def launch(self, reducer: Reducer, flags: BucketFlags) -> None: ...
    def finish(self) -> BucketFlags: ...
    def in_flight(self) -> bool: ...
    def cancel(self) -> bool: ...
    def send_empty(self, reducer: Reducer, flags: BucketFlags) -> None: ...


class Bucket:
    """Gradients of one type on one device, side by side in memory.

    Args:
        named: the parameters in the order in which backward is expected to produce their gradients; may be none.
        sparse_as_dense: whether sparse gradients become dense ones.

    Attributes:
        param_ids: the id of each parameter. The hooks of parameters hold buckets, so that these hold parameters weakly.
        early: whether it may leave as soon as all its gradients are there, before backward has ended.
    """

    def __init__(self, named: Named, sparse_as_dense: bool) -> None:
        self.name = " .. ".join(dict.fromkeys([named[0][0], named[-1][0]])) if named else "no dense gradient"
        self._names = [name for name, _ in named]
        self._parameters = [weakref.ref(parameter) for _, parameter in named]
        self.param_ids = [id(parameter) for _, parameter in named]
        self.early = True
        self._sparse_as_dense = sparse_as_dense
        kind = (named[0][1].dtype, named[0][1].device) if named else (torch.float32, torch.device("cpu"))
        starts = list(itertools.accumulate((one.numel() for _, one in named), initial=0))
        self._numbers = starts.pop()
        self._where = [(one.shape, strides(one), start) for (_, one), start in zip(named, starts, strict=True)]
        self._lie_in(_zeros(self._numbers + len(named) + len(BucketFlags()), *kind))
        self._begin()

    def _lie_in(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._views = [self._lying(place) for place in range(len(self._where))]
        self._addresses = [view.data_ptr() for view in self._views]
        self._tail: Any = flat[self._numbers :]
        self._all_there: Any = torch.ones_like(self._tail)
        self._all_there[-len(BucketFlags()) :] = 0
        if flat.device.type == "cpu" and flat.dtype in REDUCED:  # a word costs a tenth through NumPy
            self._tail, self._all_there = self._tail.numpy(), self._all_there.numpy()
        self._owners = self._count_owners(range(len(self._views)))

    def _lying(self, place: int) -> torch.Tensor:
        """The part of a gradient: no view to autograd, which would refuse the ``detach_()`` of older programs."""
        shape, strides, start = self._where[place]
        memory = self._flat.untyped_storage()
        return self._flat.new_empty(0).set_(memory, self._flat.storage_offset() + start, shape, strides)

    def _count_owners(self, places: Iterable[int]) -> tuple[int, int]:
        views = self._views
        most = max((sys.getrefcount(views[place]) for place in places), default=0)
        return most, torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata)

    def _leave_to_holders(self, places: list[int]) -> None:
        """Move, where somebody has kept a last gradient, itself or detached: theirs must not become the next one."""
        if not places or all(now <= own for now, own in zip(self._count_owners(places), self._owners, strict=True)):
            return
        before = self._views
        self._lie_in(_zeros(self._flat.numel(), self._flat.dtype, self._flat.device).copy_(self._flat))
        for weak, old, new in zip(self._parameters, before, self._views, strict=True):
            parameter = weak()
            if parameter is not None and parameter.grad is old:
                parameter.grad = new

    def _begin(self) -> None:
        """As before the first gradient of a backward."""
        self._there: set[int] = set()
        self._absent: set[int] = set()
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # a gradient in other memory, and its place here
        self._sent: tuple[int, torch.Tensor] | None = None

    def in_flight(self) -> bool:
        """Whether it is on its way."""
        return self._sent is not None

    def cancel(self) -> bool:
        """Let arrive what is on its way, and forget it; whether there was any."""
        sent = self._sent
        if sent is not None:
            synchronize(sent[0])
        self._begin()
        return sent is not None

    def send_empty(self, reducer: Reducer, flags: BucketFlags) -> None:
        """Give the other ranks, which wait for it, no gradient, and what this one says."""
        self._tail[:] = 0
        self._write_flags(flags)
        self._sent = reducer.start(self._flat, self.name)

    def mark_ready(self, parameter: Parameter) -> bool:
        """The parameter's gradient is there; whether all are now, and may leave.

        Raises:
            InvalidArgumentError: it had left already.
        """
        key = id(parameter)
        if self._sent is not None:
            raise InvalidArgumentError(
                f"the gradient of {self._names[self.param_ids.index(key)]} grew after it had been sent to the other "
                "ranks; activation checkpointing of shared weights needs use_reentrant=False."
            )
        self._there.add(key)
        return self.early and len(self._there) == len(self.param_ids)

    def _take(self, flags: BucketFlags) -> None:
        """Put all gradients into their places, with zeros for those that this rank does not have.

        Raises:
            InvalidArgumentError: a gradient that cannot lie in a bucket.
        """
        new = self._elsewhere(bool(flags.changed))
        self._leave_to_holders([place for place, _, _ in new] + [*self._absent])
        for place in self._absent:
            self._views[place].zero_()
        if new:
            torch._foreach_copy_([self._views[place] for place, _, _ in new], [one for _, _, one in new])
        # What no backward has just made, and has another holder, is the program's own memory and has to stay; but into
        # what was expanded nothing can be written.
        grown = [
            one for one in new if one[2]._version or (flags.late and not torch._debug_has_internal_overlap(one[2]))
        ]
        kept = {one[0] for one, owners in zip(grown, _owners(grown), strict=True) if owners != _owners_of_a_fresh_one()}
        for place, parameter, gradient in new:
            if place in kept:
                self._kept.append((gradient, self._views[place]))
            else:
                parameter.grad = self._views[place]

    def _elsewhere(self, changed: bool) -> list[_New]:
        """The gradients that do not lie in the bucket yet; notes which are absent."""
        new: list[_New] = []
        for place, view in enumerate(self._views):
            if view.data_ptr() != self._addresses[place]:  # ``.grad.data`` was assigned to
                self._views[place] = view = self._lying(place)
            parameter = self._fitting(place) if changed else self._parameters[place]()
            gradient = None if parameter is None else parameter.grad
            if parameter is None or gradient is None:
                self._absent.add(place)
            elif gradient is not view:
                new.append((place, parameter, self._dense(self._names[place], gradient)))
        return new

    def _dense(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.requires_grad:
            raise InvalidArgumentError(
                f"the gradient of {name} has a graph (backward(create_graph=True)), which no mean over ranks can keep; "
                "take second derivatives of torch.autograd.grad instead."
            )
        if not gradient.is_sparse:
            return gradient
        if not self._sparse_as_dense:
            raise InvalidArgumentError(
                f"the gradient of {name} is sparse, though no module with sparse=True holds it; use "
                "distribute(..., sparse_as_dense=True)."
            )
        return gradient.to_dense()

    def launch(self, reducer: Reducer, flags: BucketFlags) -> None:
        """Begin to travel, if it has not yet."""
        if self._sent is not None:
            return
        self._take(flags)
        self._tail[:] = self._all_there
        self._write_flags(flags)
        for place in self._absent:
            self._tail[place] = 0
        if step_times.MONITORS:
            self._look()
        self._sent = reducer.start(self._flat, self.name)

    def _write_flags(self, flags: BucketFlags) -> None:
        for place, one in enumerate(flags, start=-len(flags)):
            if one:
                self._tail[place] = one

    def _look(self) -> None:
        """Say of what this rank's own gradient is not finite, while it can be told from the others'."""
        whole = total_norm([self._flat[: self._numbers]])
        if self._flat.is_cuda:  # which the host does not wait for
            step_times.looked(self._names[0], whole)
        elif not whole.isfinite():
            name = next((n for n, v in zip(self._names, self._views, strict=True) if not v.isfinite().all()), "")
            step_times.looked(name, math.nan if name else 0.0)

    def finish(self) -> BucketFlags:
        """Wait; then every gradient that some rank had is the mean."""
        handle, carried = self._sent  # type: ignore[misc]
        synchronize(handle)
        if carried is self._flat:
            shares = self._tail.tolist()
        else:
            real = torch.view_as_real(self._flat) if self._flat.is_complex() else self._flat
            if carried.data_ptr() != real.data_ptr():
                real.copy_(carried)
            flags = carried[self._numbers :]
            shares = (flags[:, 0] if self._flat.is_complex() else flags).tolist()
        for place in self._absent:
            if shares[place] > 0 and (parameter := self._fitting(place)) is not None:
                parameter.grad = self._views[place]
        for gradient, view in self._kept:
            gradient.copy_(view)
        self._begin()
        return BucketFlags(*shares[-len(BucketFlags()) :])

    def _fitting(self, place: int) -> Parameter | None:
        """The parameter, if there still is one and it is what it was when the bucket was made."""
        parameter, view = self._parameters[place](), self._views[place]
        if parameter is None or (parameter.dtype, parameter.device, parameter.shape) != (
            self._flat.dtype,
            self._flat.device,
            view.shape,
        ):
            return None
        return parameter


def in_buckets(named: Named, layout: BucketLayout, sparse: set[int]) -> list[AnyBucket]:
    """Buckets of parameters that train; at least one.

    Args:
        named: the parameters in the order in which backward produces their gradients.
        sparse: the id of each parameter whose gradient is sparse.
    """
    travel_alone = [] if layout.sparse_as_dense else [one for one in named if id(one[1]) in sparse]
    alone = {id(parameter) for _, parameter in travel_alone}
    dense = [one for one in named if id(one[1]) not in alone]
    made: list[AnyBucket] = [SparseGradient(*one) for one in travel_alone]
    made += [Bucket(members, layout.sparse_as_dense) for members in layout.split(dense)]
    return made if any(isinstance(one, Bucket) for one in made) else [*made, Bucket([], layout.sparse_as_dense)]
