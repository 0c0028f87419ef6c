"""Gradients that are the mean over the ranks when ``backward()`` returns (step 4).

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
from hvdkit.steps import passes, starting
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.outer import group_of, wanted
from hvdkit.steps.shard_state import require_alone
from hvdkit.steps.torch_tensors import sends_bfloat16
from hvdkit.torch.backward import exchanges, look_at_steps
from hvdkit.torch.buckets import BucketLayout, Named
from hvdkit.torch.exchange import Exchange, named_of, of_sparse_modules
from hvdkit.torch.outer import take_outer_steps
from hvdkit.torch.private import eagerly
from hvdkit.torch.sharded import ShardedOptimizer, works_on_numbers
from hvdkit.torch.state import DISTRIBUTED, RANKS, parameters_of, sample_of

_COUNTED = "_hvdkit_counted"


def distribute(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    op: str = "average",
    compression: str = "none",
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    groups: int | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    bucket_mb: float = 4,
    every: int | None = None,
    outer: str = "nesterov",
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    outer_overlap: int = 0,
    shard_state: bool = False,
) -> torch.optim.Optimizer:
    """From now on ``.grad`` is the mean over all ranks when ``backward()`` returns (step 4); returns the optimizer.

    It is the same object. Clip, unscale, accumulate, pass a closure as on one process. Gradients travel in buckets
    while backward computes others. A parameter that no rank used keeps ``grad is None``; where some ranks used it, the
    others count as zeros. The loss that a closure returns is averaged, too. Parameters that begin to train later, and
    groups that are added, join at the next backward.

    Args:
        optimizer: any ``torch.optim`` optimizer.
        model: names the gradients; must hold every parameter of the optimizer.
        op, compression, backward_passes_per_step, gradient_predivide_factor: see ``GradientOptions``. As PyTorch
            accumulates, the gradients of several passes are summed: divide the loss by their number for a mean.
        groups: number of buckets, in the place of ``bucket_mb``.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: reduce only over these ranks (``horovod.torch.ProcessSet``); default: all.
        bucket_mb: a bucket leaves from so many MB (1,000,000 bytes) on, when its gradients are there.
        every: average gradients among the ranks of a host alone (of ``process_set``; "rank": not at all), and what
            the weights have become over all ranks every so many steps (DiLoCo). ``compression`` is then that of the
            weights. It is another guarantee: see docs/slow_networks.md, and ``average_weights``.
        outer, outer_lr, outer_momentum, outer_overlap: see ``hvdkit.steps.outer.OuterOptions``.
        shard_state: divide the optimizer's state among all ranks (ZeRO stage 1), so that each keeps 1 / size of it and
            updates these numbers alone. Weights become what they become without. Of parameters in bfloat16 or float16
            the state holds a float32 master copy, too. See docs/shard_state.md.

    With op="adasum" it returns Horovod's own optimizer instead, whose ``step`` combines what the ranks' steps would do.

    Raises:
        InvalidArgumentError: bad options, an optimizer distributed twice or one whose state cannot be divided,
            parameters that are not in the model, or one whose gradient cannot travel. In ``backward``: a gradient of
            another kind than its parameter.
        AgreementError: in ``backward``, on every rank: the ranks train different parameters.
    """
    layout = BucketLayout(bucket_mb, groups, sparse_as_dense)
    divided = require_alone(shard_state, every=every, op=op, process_set=process_set)
    how = {"compression": compression, "op": op, "process_set": process_set}
    outer_options = wanted(every, outer, outer_lr, outer_momentum, outer_overlap, **how)
    if outer_options is not None:  # the compression is then that of the weights
        compression, process_set = "none", group_of(starting.of(hvd, ""), RANKS, process_set, hvd)
    options = GradientOptions(op, compression, backward_passes_per_step, gradient_predivide_factor)
    named = _named_parameters(optimizer, model)
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
        divided = divided and ranks.size() > 1
        may_cut = works_on_numbers(optimizer) if divided else False
        Exchange(optimizer, model, options, layout, ranks)
        look_at_steps()
        if divided:
            sparse = {id(one) for one in of_sparse_modules(model)} if not layout.sparse_as_dense else set()
            ShardedOptimizer(optimizer, may_cut, sparse)
    setattr(optimizer, DISTRIBUTED, " (distributed)")
    passes.expect_steps()
    passes.look_at_weights(model, sample_of)
    if outer_options is not None:
        take_outer_steps(optimizer, model, outer_options)
    return optimizer


def _named_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Named:
    """The optimizer's parameters by their names in the model.

    Raises:
        InvalidArgumentError: not an optimizer or not a model, one distributed already, or parameters of no model.
    """
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
    return named


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
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Backwards in here keep their gradients on this rank; the first one after it averages the sum of all of them.

    For gradient accumulation with fewer exchanges: ``with hk.no_sync(model): loss.backward()``, and the last one
    without. Use it alike on every rank. No step is taken with gradients of one rank: ``step()`` exchanges what no
    backward has.

    Args:
        model: whose optimizer, or optimizers, ``distribute`` has got.
    Raises:
        InvalidArgumentError: none of its parameters is in an optimizer that is distributed. In ``step``: gradients that
            were changed, by clipping, while they were this rank's own.
    """
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
