"""Gradients that travel in contiguous buckets; the inside of ``hvdkit.torch.distribute(bucket_mb=)``.

Horovod copies many small gradients into its fusion buffer and back after the allreduce. Here each gradient is a view
of a bucket that travels as one tensor: it is copied once, when it has just been computed, and negotiated once a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import _DistributedOptimizer

from hvdkit.errors import InvalidArgumentError

Named = Sequence[tuple[str, torch.nn.Parameter]]


class Bucket:
    """Gradients of one type on one device, side by side in memory.

    Args:
        named: the parameters in the order in which backward is expected to produce their gradients.
    """

    def __init__(self, named: Named) -> None:
        first, last = named[0][0], named[-1][0]
        self.name = first if len(named) == 1 else f"{first}..{last}"
        self.parameters = [parameter for _, parameter in named]
        sample = self.parameters[0]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.zeros(sum(sizes), dtype=sample.dtype, device=sample.device)
        pieces = zip(torch.split(self.flat, sizes), self.parameters, strict=True)
        self.views = {parameter: piece.view(parameter.shape) for piece, parameter in pieces}
        self.forget()

    def forget(self) -> None:
        """As before the first gradient of a step."""
        self._ready: set[torch.nn.Parameter] = set()
        self._handle: int | None = None
        self._context: Any = None

    def take(self, parameter: torch.nn.Parameter, start: Callable[[torch.Tensor, str], tuple[int, Any]]) -> None:
        """Put the parameter's gradient in its place, zeros where it has none; with the last one the bucket leaves."""
        view, gradient = self.views[parameter], parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise InvalidArgumentError(
                f"the gradient of a parameter in bucket {self.name!r} is sparse and cannot lie in a bucket; use "
                "bucket_mb=None."
            )
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        parameter.grad = view
        self._ready.add(parameter)
        if len(self._ready) == len(self.parameters):
            self._handle, self._context = start(self.flat, self.name)

    def wait(self, parameter: torch.nn.Parameter, decompress: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
        """The reduced gradient; waits for the bucket once."""
        if self._handle is not None:
            arrived: torch.Tensor = decompress(hvd.synchronize(self._handle), self._context)
            if arrived.data_ptr() != self.flat.data_ptr():
                self.flat.copy_(arrived)
            self.forget()
        return self.views[parameter]


def require_possible(bucket_mb: float, op: str, groups: Any, sparse_as_dense: bool) -> None:
    """Refuse what buckets cannot do.

    Raises:
        InvalidArgumentError: bucket_mb not positive and finite, or beside an option that works tensor by tensor.
    """
    if not (isinstance(bucket_mb, (int, float)) and math.isfinite(bucket_mb) and bucket_mb > 0):
        raise InvalidArgumentError(f"bucket_mb must be a positive, finite number of MB, got {bucket_mb!r}.")
    for name, given in (("op='adasum'", op == "adasum"), ("groups", groups), ("sparse_as_dense", sparse_as_dense)):
        if given:
            raise InvalidArgumentError(f"bucket_mb and {name} exclude each other; leave one of them out.")


def distributed(optimizer: torch.optim.Optimizer, named: Named, bucket_mb: float, **options: Any) -> Any:
    """What ``horovod.torch.DistributedOptimizer`` returns, with its gradients in buckets.

    Args:
        optimizer: to distribute.
        named: its parameters, in the order of the model.
        bucket_mb: a bucket is full from so many MB (1,000,000 bytes) on.
        options: Horovod's ``compression``, ``op``, ``backward_passes_per_step``, ``gradient_predivide_factor`` and
            ``process_set``.
    """
    # Horovod makes its optimizer in the same way: its methods in a new subclass of the optimizer's class.
    methods = {**vars(_DistributedOptimizer), "_allreduce_grad_async": _allreduce, "load_state_dict": _load_state}
    made = type(type(optimizer).__name__, (type(optimizer),), methods)(optimizer.param_groups, named, **options)
    made._buckets = in_buckets(named, bucket_mb)
    made._bucket_of = {parameter: bucket for bucket in made._buckets for parameter in bucket.parameters}
    return made


def in_buckets(named: Named, bucket_mb: float) -> list[Bucket]:
    """Buckets of parameters that train, last layer first, as backward produces gradients."""
    open_ones: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.nn.Parameter]]] = {}
    full: list[Bucket] = []
    for name, parameter in reversed([(name, parameter) for name, parameter in named if parameter.requires_grad]):
        kind = (parameter.dtype, parameter.device)
        members = open_ones.setdefault(kind, [])
        members.append((name, parameter))
        if _bytes(one for _, one in members) >= 1e6 * bucket_mb:
            full.append(Bucket(open_ones.pop(kind)))
    return [*full, *map(Bucket, open_ones.values())]


def _bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _allreduce(self: Any, parameter: torch.nn.Parameter) -> tuple[Callable[[], torch.Tensor], Any]:
    """In the place of Horovod's ``_allreduce_grad_async``, called when the parameter's gradient is complete."""
    bucket = self._bucket_of[parameter]
    bucket.take(parameter, partial(_start, self))
    # Horovod decompresses what the first returns; it has its own type already, which is the second.
    return partial(bucket.wait, parameter, self._compression.decompress), parameter.dtype


def _start(self: Any, flat: torch.Tensor, name: str) -> tuple[int, Any]:
    compressed, context = self._compression.compress(flat)
    factor = self.gradient_predivide_factor if self.op == hvd.Average else 1.0
    handle = hvd.allreduce_async_(
        compressed,
        name=name,
        op=self.op,
        prescale_factor=1.0 / factor,
        postscale_factor=factor,
        process_set=self.process_set,
    )
    return handle, context


def _load_state(self: Any, *args: Any, **kwargs: Any) -> None:
    _DistributedOptimizer.load_state_dict(self, *args, **kwargs)
    for bucket in self._buckets:
        bucket.forget()
