"""What goes to the other ranks over Horovod: flat tensors, and the rows of sparse gradients; used by ``buckets``."""

from __future__ import annotations

import math
import weakref
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import synchronize  # the one of ``hvd`` is a range of its own where a profile is made

from hvdkit.core.control import NO_FLAGS, Flags
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.torch_tensors import sends_bfloat16
from hvdkit.torch import private

REDUCED = (torch.float16, torch.float32, torch.float64)  # what every Horovod adds up, and NumPy knows
_NARROW = (torch.float32, torch.float64, torch.bfloat16)  # what compression="fp16" sends in half precision


class Reducer:
    """Averages flat tensors, in place, over the ranks of a process set.

    Args:
        process_set: Horovod's.
        compression: "none" or "fp16".
        predivide: f: divide by f before and by size / f after the sum.
    """

    def __init__(self, process_set: Any, compression: str, predivide: float) -> None:
        self.process_set, self._compression, self._predivide = process_set, compression, predivide

    def carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as one that Horovod can send, itself where it can be."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if self._compression == "fp16" and real.dtype in _NARROW:
            return real.half()
        if real.dtype == torch.bfloat16 and sends_bfloat16(real.device.type, self.process_set.size()):
            return real
        return real if real.dtype in REDUCED else real.float()

    def start(self, flat: torch.Tensor, name: str) -> tuple[int, torch.Tensor]:
        """Begin to average; returns Horovod's handle and what travels."""
        carried = self.carried(flat)
        before, after = 1.0 / self._predivide, self._predivide / self.process_set.size()
        if carried.dtype != torch.float16 and math.frexp(after)[0] == 0.5:  # exact, and now it is in the cache
            before, after = before * after, 1.0
        handle = hvd.allreduce_async_(
            carried,
            name=name,
            op=hvd.Sum,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self.process_set,
        )
        return handle, carried

    def gather(self, rows: torch.Tensor, name: str) -> int:
        """Begin to collect all ranks' rows; returns Horovod's handle."""
        handle: int = hvd.allgather_async(rows, name=name, process_set=self.process_set)
        return handle


class SparseGradient:
    """The sparse gradient of one parameter: the rows of all ranks, one after another, and equal ones added.

    Args:
        name, parameter: of a module with ``sparse=True``.
    Attributes:
        arrived, leaves_early, param_ids: see ``AnyBucket``.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.name, self.param_ids, self._parameter = name, [id(parameter)], weakref.ref(parameter)
        self._shape, self._type, self._device = parameter.shape, parameter.dtype, parameter.device
        self._sent: tuple[int, int, int] | None = None
        self.arrived: list[int] = []
        self.leaves_early = True

    def in_flight(self) -> bool:
        """Whether it is on its way."""
        return self._sent is not None

    def cancel(self) -> bool:
        """Let arrive what is on its way, and forget it; whether there was any."""
        handles, self._sent = (self._sent or ())[:2], None
        self.arrived.clear()
        for handle in handles:
            synchronize(handle)
        return bool(handles)

    def send_empty(self, reducer: Reducer, flags: Flags) -> None:  # noqa: ARG002
        """Give the other ranks, which wait for it, no rows."""
        self._send(reducer, None)

    def is_complete(self) -> bool:
        """The gradient has come, perhaps again; whether it may leave before the end of backward.

        Raises:
            InvalidArgumentError: it is dense, or had left already.
        """
        if self._sent is not None:
            raise InvalidArgumentError(
                f"the gradient of {self.name} grew after it had been sent to the other ranks; activation checkpointing "
                "of shared weights needs use_reentrant=False."
            )
        self.leaves_early = self.leaves_early and len(self.arrived) == 1
        parameter = self._parameter()
        self._require_sparse(parameter)
        return self.leaves_early and len(private.gradient_hooks(parameter)) == 1

    def _require_sparse(self, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.grad is not None and not parameter.grad.is_sparse:
            raise InvalidArgumentError(
                f"the gradient of {self.name} is dense, though its module has sparse=True (its weight has another use, "
                "too); use distribute(..., sparse_as_dense=True)."
            )

    def launch(self, reducer: Reducer, flags: Flags) -> None:  # noqa: ARG002
        """Begin to travel, if it has not yet, with no rows where this rank has no gradient."""
        if self._sent is not None:
            return
        parameter = self._parameter()
        self._require_sparse(parameter)
        self._send(reducer, None if parameter is None else parameter.grad)

    def _send(self, reducer: Reducer, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            indices = torch.empty((0, 1), dtype=torch.int64, device=self._device)
            values = torch.empty((0, *self._shape[1:]), dtype=self._type, device=self._device)
        else:
            gradient = gradient.coalesce()
            indices, values = gradient.indices().t().contiguous(), gradient.values()
        rows, numbers = (f"{self.name}.{part}" for part in ("indices", "values"))
        size = reducer.process_set.size()
        self._sent = reducer.gather(indices, rows), reducer.gather(reducer.carried(values).contiguous(), numbers), size

    def finish(self) -> Flags:
        """Wait; then the gradient, where some rank had one, is the mean. Says nothing more."""
        rows, numbers, size = self._sent  # type: ignore[misc]
        parameter = self._parameter()
        indices, values = synchronize(rows), synchronize(numbers)
        if self._type.is_complex:
            values = torch.view_as_complex(values.contiguous())
        if len(indices) and parameter is not None:
            values = values.to(self._type) / size
            parameter.grad = torch.sparse_coo_tensor(
                indices.t(), values, parameter.shape, check_invariants=False
            ).coalesce()
        self._sent = None
        self.arrived.clear()
        return NO_FLAGS
