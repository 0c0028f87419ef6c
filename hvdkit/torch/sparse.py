"""How PyTorch's sparse gradients travel: as rows, each alone; beside the buckets of dense ones."""

from __future__ import annotations

import weakref

import torch
from horovod.torch.mpi_ops import synchronize

from hvdkit.core.layout import NO_FLAGS, Flags
from hvdkit.errors import InvalidArgumentError
from hvdkit.torch import private
from hvdkit.torch.buckets import Bucket, Parameter, Reducer


class SparseGradient:
    """The sparse gradient of a parameter of a module with ``sparse=True``: the rows of all ranks, equal ones added.

    For its attributes and methods see ``Bucket``.
    """

    def __init__(self, name: str, parameter: Parameter) -> None:
        self.name, self.param_ids, self._parameter = name, [id(parameter)], weakref.ref(parameter)
        self.on_gpu = False  # one gradient leaves on the stream on which it came
        self._shape, self._type, self._device = parameter.shape, parameter.dtype, parameter.device
        self._sent: tuple[int, int, int] | None = None
        self.arrived: list[int] = []
        self.leaves_early = True

    def in_flight(self) -> bool:
        return self._sent is not None

    def note_stream(self) -> None:
        """Of no use here."""

    def begin(self) -> None:
        self.arrived.clear()
        self._sent = None

    def send_empty(self, reducer: Reducer, flags: Flags) -> None:  # noqa: ARG002
        self._send(reducer, None)

    def is_complete(self) -> bool:
        if self._sent is not None:
            raise InvalidArgumentError(
                f"the gradient of {self.name} grew after it had been sent to the other ranks; activation checkpointing "
                "of shared weights needs use_reentrant=False."
            )
        self.leaves_early = self.leaves_early and len(self.arrived) == 1
        parameter = self._parameter()
        self._require_sparse(parameter)
        return self.leaves_early and len(private.gradient_hooks(parameter)) == 1

    def _require_sparse(self, parameter: Parameter | None) -> None:
        if parameter is not None and parameter.grad is not None and not parameter.grad.is_sparse:
            raise InvalidArgumentError(
                f"the gradient of {self.name} is dense, though its module has sparse=True (its weight has another use, "
                "too); use distribute(..., sparse_as_dense=True)."
            )

    def launch(self, reducer: Reducer, flags: Flags) -> None:  # noqa: ARG002
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
        self.begin()
        return NO_FLAGS


AnyBucket = Bucket | SparseGradient
"""Gradients that leave together."""
