"""Gradients that are the mean over the ranks when ``backward()`` returns; the inside of ``hvdkit.torch.distribute``.

A hook on every parameter puts its fresh gradient into a bucket, which travels while backward computes others. A
callback at the end of backward sends the rest and waits. Read on in ``exchange``, ``buckets`` and ``backward``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import horovod.torch as hvd
import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import passes
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.torch_tensors import sends_bfloat16
from hvdkit.torch.backward import exchanges, look_at_steps
from hvdkit.torch.buckets import BucketLayout, Named
from hvdkit.torch.divisible import works_on_numbers
from hvdkit.torch.exchange import Exchange, named_of, of_sparse_modules
from hvdkit.torch.private import eagerly
from hvdkit.torch.sharded import ShardedOptimizer
from hvdkit.torch.state import DISTRIBUTED, parameters_of, sample_of

_COUNTED = "_hvdkit_counted"


def distributed(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    options: GradientOptions,
    layout: BucketLayout,
    process_set: Any,
    shard_state: bool = False,
) -> torch.optim.Optimizer:
    """The inside of ``hvdkit.torch.distribute``, which says what is taken and refused."""
    for what, given, kind in (("optimizer", optimizer, torch.optim.Optimizer), ("model", model, torch.nn.Module)):
        if not isinstance(given, kind):
            raise InvalidArgumentError(
                f"distribute takes an optimizer of torch.optim and the model, a torch.nn.Module; as {what} it got "
                f"{type(given).__name__}."
            )
    if type(optimizer).__module__ == hvd.DistributedOptimizer.__module__ or any(
        one.optimizer() is optimizer for one in exchanges()
    ):
        raise InvalidArgumentError(
            "this optimizer is distributed already; call distribute once, its gradients are averaged."
        )
    names = {id(parameter): name for name, parameter in named_of(model)}
    named = [(names.get(id(one), ""), one) for one in parameters_of(optimizer)]
    missing = [one for name, one in named if not name]
    if missing:
        raise InvalidArgumentError(
            f"the optimizer holds {len(named)} parameters, {len(named) - len(missing)} of them in the model; make the "
            "optimizer from this model's parameters(), after moving the model to its device. If it trains several "
            "models, distribute torch.nn.ModuleList([model, other]). Make a lone tensor a torch.nn.Parameter before "
            "the optimizer gets it, and distribute torch.nn.ParameterList([it])."
        )
    ranks = hvd.global_process_set if process_set is None else process_set
    if hvd.size() > 1:  # else Horovod leaves Adasum out
        devices = {one.device.type for _, one in named if one.dtype in (torch.float32, torch.float64)}
        options.require_possible(
            ranks.size(),
            all_ranks=ranks.process_set_id == 0,
            over_mpi=hvd.mpi_enabled(),
            adds_bfloat16=all(sends_bfloat16(device, ranks.size()) for device in devices),
        )
    if options.op == "adasum":
        optimizer = _adasum(optimizer, named, options)
    else:
        divided = shard_state and ranks.size() > 1
        may_cut = works_on_numbers(optimizer) if divided else False
        Exchange(optimizer, model, options, layout, ranks)
        look_at_steps()
        if divided:
            sparse = {id(one) for one in of_sparse_modules(model)} if not layout.sparse_as_dense else set()
            ShardedOptimizer(optimizer, may_cut, sparse)
    setattr(optimizer, DISTRIBUTED, " (distributed)")
    passes.expect_steps()
    passes.look_at_weights(model, sample_of)
    return optimizer


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
    made.register_step_post_hook(passes.stepped)
    return cast(torch.optim.Optimizer, made)


@contextlib.contextmanager
def unsynchronized(model: torch.nn.Module) -> Iterator[None]:
    """The inside of ``hvdkit.torch.no_sync``."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"no_sync takes the model, got {type(model).__name__}.")
    parameters = list(model.parameters())
    found = [one for one in exchanges() if any(map(one.has, parameters))]
    if not found:
        raise InvalidArgumentError("no_sync takes a model whose optimizer distribute has got; this one has none.")
    with contextlib.ExitStack() as stack:
        for one in found:
            stack.enter_context(one.suspended())
        yield


def forget_agreements() -> None:
    """Horovod has started anew with other ranks, or some have joined: agree and count anew."""
    for one in exchanges():
        one.forget_agreement()


def count_steps(optimizer: Any) -> None:
    """Count the steps of an optimizer that may never be distributed, for ``passes``."""
    passes.expect_steps()
    if hasattr(optimizer, "_optimizer_step_post_hooks") and not hasattr(optimizer, _COUNTED):
        optimizer.register_step_post_hook(eagerly(passes.stepped))
        setattr(optimizer, _COUNTED, True)
