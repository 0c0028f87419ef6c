"""The optimizer of ``hvdkit.torch.distribute``: Horovod's, over its own buffer or over ``buckets``."""

from __future__ import annotations

from typing import Any, cast

import horovod.torch as hvd
import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.gradients import GradientOptions
from hvdkit.torch import buckets


def distributed(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    options: GradientOptions,
    groups: int | list[list[torch.Tensor]] | None,
    sparse_as_dense: bool,
    process_set: Any,
    bucket_mb: float | None,
) -> torch.optim.Optimizer:
    """The inside of ``hvdkit.torch.distribute``, which says what is taken and refused."""
    if type(optimizer).__module__ == hvd.DistributedOptimizer.__module__:
        raise InvalidArgumentError(
            "this optimizer is distributed already; call distribute once, its gradients are averaged."
        )
    named = _named_parameters(optimizer, model)
    ranks = hvd.global_process_set if process_set is None else process_set
    if hvd.size() > 1:  # else Horovod leaves Adasum out
        options.require_possible(ranks.size(), all_ranks=ranks.process_set_id == 0, over_mpi=hvd.mpi_enabled())
    shared: dict[str, Any] = {
        "compression": hvd.Compression.fp16 if options.compression == "fp16" else hvd.Compression.none,
        "backward_passes_per_step": options.backward_passes_per_step,
        "op": {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}[options.op],
        "gradient_predivide_factor": options.gradient_predivide_factor,
        "process_set": ranks,
    }
    if bucket_mb is not None:
        buckets.require_possible(bucket_mb, options.op, groups, sparse_as_dense)
        made = buckets.distributed(optimizer, named, bucket_mb, **shared)
    else:
        made = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, groups=groups, sparse_as_dense=sparse_as_dense, **shared
        )
    # Horovod makes a new optimizer from the parameter groups alone: defaults and state would be lost.
    made.defaults = optimizer.defaults
    made.state.update(optimizer.state)
    return cast(torch.optim.Optimizer, made)


def _named_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in owned]
    if len(named) < len(owned):
        raise InvalidArgumentError(
            f"the optimizer holds {len(owned)} parameters, {len(named)} of them in the model; make the optimizer from "
            "this model's parameters(), after moving the model to its device."
        )
    return named
