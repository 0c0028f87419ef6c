"""The eight steps for PyTorch, over ``horovod.torch``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from hvdkit.errors import InvalidArgumentError, MissingFrameworkError
from hvdkit.observe.allreduce_counts import COUNTS
from hvdkit.observe.recording import TimelineSteps
from hvdkit.observe.step_files import record_steps
from hvdkit.observe.torch_profile import profile
from hvdkit.steps import metrics as averages
from hvdkit.steps import passes, starting
from hvdkit.steps.epochs import steps_per_epoch
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.learning_rate import scale_lr
from hvdkit.steps.outer import average_weights, end_windows, group_of, wanted
from hvdkit.steps.shard_state import require_alone
from hvdkit.steps.topology import Topology

try:
    import torch
except ImportError as error:
    raise MissingFrameworkError(
        "hvdkit.torch needs PyTorch, which cannot be imported; run `pip install torch`."
    ) from error
try:
    import horovod.torch as hvd
except ImportError as error:
    raise MissingFrameworkError(
        f"hvdkit.torch needs Horovod built for PyTorch {torch.__version__}, and importing it failed ({error}); run "
        "`hvdkit install`, or `hvdkit doctor` for the reason."
    ) from error
if not hasattr(hvd, "init"):
    raise MissingFrameworkError(
        "Horovod is installed without its PyTorch extension; run `hvdkit install --force --frameworks torch`."
    )

from hvdkit.torch import data, device, state, torchmetrics
from hvdkit.torch import optimizer as averaging
from hvdkit.torch import schedule as rates
from hvdkit.torch.agreement import CheckAgreement, check_agreement
from hvdkit.torch.backward import tell_how_many
from hvdkit.torch.buckets import FUSION_BYTES, BucketLayout
from hvdkit.torch.checkpoint import Checkpoints
from hvdkit.torch.ddp import init_process_group
from hvdkit.torch.elastic import ElasticState, run_elastic
from hvdkit.torch.global_batch import average_statistics, gather, sync_batch_norm
from hvdkit.torch.loss import weighted_loss
from hvdkit.torch.monitor import Monitor, begin_if_asked
from hvdkit.torch.outer import take_outer_steps
from hvdkit.torch.seeds import seed_everything
from hvdkit.torch.sharded import gather_state
from hvdkit.torch.state import RANKS

__all__ = [
    "CheckAgreement",
    "Checkpoints",
    "ElasticState",
    "Monitor",
    "Topology",
    "average_metrics",
    "average_statistics",
    "average_weights",
    "broadcast_state",
    "check_agreement",
    "distribute",
    "fit",
    "gather",
    "gather_state",
    "init",
    "init_process_group",
    "join",
    "no_sync",
    "pin_device",
    "profile",
    "record_steps",
    "record_timeline",
    "run_elastic",
    "scale_lr",
    "seed_everything",
    "shard",
    "steps_per_epoch",
    "sync_batch_norm",
    "warmup",
    "weighted_loss",
]


# 1 ------------------------------------------------------------------------------------------------------------------


def init() -> Topology:
    """Start Horovod and say who this process is (step 1). Without a launcher: a job of one process.

    Unless HOROVOD_FUSION_THRESHOLD or HOROVOD_AUTOTUNE is set, Horovod's fusion buffer has 4 MiB: the buckets of
    ``distribute`` then travel from where they are, and are not copied together. ``compute()`` of torchmetrics' metrics
    is from now on over all ranks, on which all must call it.

    Raises:
        LauncherError: the launcher's environment is incomplete.
        TopologyMismatchError: the launcher and Horovod disagree about rank or size.
    """
    if not os.environ.get("HOROVOD_AUTOTUNE"):
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_BYTES))
    world = starting.start(hvd, os.environ)
    COUNTS.begin(hvd, RANKS)
    torchmetrics.install()
    begin_if_asked(world)
    return world


# 2 ------------------------------------------------------------------------------------------------------------------


def pin_device(world: Topology, kind: str = "auto", threads: int | None = None) -> torch.device:
    """Give this process one GPU, or its share of the CPU cores (step 2).

    Args:
        world: the job; ``local_rank`` and ``local_size`` are used.
        kind: "auto" (a GPU where PyTorch sees one), "gpu" or "cpu".
        threads: compute threads on the CPU; default: OMP_NUM_THREADS, else the usable cores divided by the ranks here.
    Returns:
        The device, already current (``torch.cuda.set_device``).
    Raises:
        InvalidArgumentError: an unknown kind, threads < 1, or "gpu" where PyTorch sees none.
        LauncherError: more processes on this host than GPUs.
    """
    return device.pin(world, kind, threads)


# 3: scale_lr is the neutral one ---------------------------------------------------------------------------------------


def warmup(
    optimizer: torch.optim.Optimizer,
    world: Topology,
    steps_per_epoch: int,
    epochs: float = 5,
    rule: str = "linear",
    after: Callable[[int], float] | None = None,
) -> rates.Warmup:
    """Gradual warmup from the base learning rate to the scaled one (step 3); call ``.step()`` after every step.

    Args:
        optimizer: its learning rates are the scaled ones, from ``scale_lr`` with the same rule.
        world: the job; only ``size`` is used.
        steps_per_epoch: optimizer steps in an epoch, from ``steps_per_epoch``.
        epochs: length of the warmup in epochs; 0 is none.
        rule: the rule that scaled the rate: "linear", "sqrt" or "none".
        after: multiplier by the number of steps since the end of the warmup, for a decay that follows it.
    Raises:
        InvalidArgumentError: a number out of range or an unknown rule.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2.
    """
    return rates.Warmup(optimizer, world, steps_per_epoch, epochs, rule, after)


# 4 ------------------------------------------------------------------------------------------------------------------


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
            updates these numbers alone. Weights become what they become without. See docs/shard_state.md.

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
        compression, process_set = "none", group_of(starting.of(hvd, ""), state.RANKS, process_set, hvd)
    options = GradientOptions(op, compression, backward_passes_per_step, gradient_predivide_factor)
    made = averaging.distributed(optimizer, model, options, layout, process_set, divided)
    if outer_options is not None:
        take_outer_steps(made, model, outer_options)
    return made


def no_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
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
    return averaging.unsynchronized(model)


# 5 ------------------------------------------------------------------------------------------------------------------


def broadcast_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, root: int = 0) -> None:
    """Give every rank the root's parameters, buffers and optimizer state, bit for bit (step 5).

    In place: the optimizer's groups, its states and the tensors in them stay the objects that a scheduler may hold.
    After ``seed_everything`` PyTorch's generators move from the stream that all ranks share to this rank's own.

    Args:
        model: parameters and buffers are overwritten on all ranks but the root.
        optimizer: its whole state (slots, step counters, learning rates) is overwritten too. Unlike Horovod's own
            function this one takes no step to make a state that is not there yet.
        root: rank to copy from.
    Raises:
        InvalidArgumentError: a root that is not a rank, several models or optimizers, lazy parameters that have no
            shape yet.
        AgreementError: the ranks' models differ in names, shapes or types, or their optimizers in kind or parameter
            groups; raised on every rank.
        RootError: the root's optimizer holds what cannot be sent; the root raises the reason.
    """
    state.require_torch(model, optimizer)
    end_windows()
    tell_how_many(RANKS, hvd.global_process_set)
    state.broadcast(model, optimizer, root)
    if optimizer is not None:
        averaging.count_steps(optimizer)
        passes.look_at_weights(model, state.sample_of)


# 6: Checkpoints is in checkpoint ------------------------------------------------------------------------------------


# 7 ------------------------------------------------------------------------------------------------------------------


def shard(
    dataset: torch.utils.data.Dataset[Any],
    world: Topology,
    batch_size: int,
    *,
    remainder: str = "drop",
    shuffle: bool = True,
    seed: int = 0,
    sampler: Iterable[int] | None = None,
    **loader_options: Any,
) -> Any:
    """A ``DataLoader`` over this rank's part of the data set (step 7). Every rank calls it, as a collective.

    Args:
        dataset: map-style, with a length, the same on every rank; between epochs it may grow or shrink, alike on all.
            Or an ``IterableDataset`` of unknown length that yields this rank's own samples: every rank then takes the
            same number of steps, until the first rank cannot fill a batch ("drop") or until no rank has a sample left
            ("exact"); seed and shuffle are its own affair. HuggingFace's ``IterableDataset`` is dealt out to the ranks,
            and while one is read RANK and WORLD_SIZE are set, which webdataset's ``split_by_node`` asks for.
        world: the job; rank and size are used.
        batch_size: samples per step on one rank.
        remainder: what becomes of an epoch's last partial batch, see ``Shard``: "drop", "pad", or "exact", with which
            each batch is ``(x, y, w)``, w float64 (m,), for ``weighted_loss``; a batch that is no plain tuple or list
            but a tensor, dict, named tuple or object is ``(batch, w)``.
        shuffle: draw a new order each epoch, without any call; ``set_epoch`` exists to resume.
        seed: of the order, the same on every rank.
        sampler: what draws the order in the place of ``shuffle``, such as ``WeightedRandomSampler``, for the whole
            data set, all ranks together: its length is that of an epoch. See ``SampledShard``.
        loader_options: for ``DataLoader``: ``num_workers``, ``pin_memory``, ``collate_fn``, ...
    Raises:
        InvalidArgumentError: a data set or sampler without length, bad numbers, or an option that shard decides; over a
            stream, on every rank: one that is empty or, with "drop", fills no batch on some rank.
        AgreementError: the ranks' data sets hold other lists, arrays or tables; raised on every rank.
        DataError: over a stream: the data set of another rank raised an error.
    """
    how = {"remainder": remainder, "shuffle": shuffle, "seed": seed, "sampler": sampler, "options": loader_options}
    return data.sharded(dataset, world, batch_size, **how)


# 8: steps_per_epoch is the neutral one -------------------------------------------------------------------------------


def average_metrics(metrics: Mapping[str, Any], world: Topology) -> dict[str, float]:
    """The mean of each metric over all ranks, the same on every rank.

    Args:
        metrics: by name, a number (every rank counts the same) or a pair (sum, count), which gives sum of sums / sum
            of counts: exact whatever each rank saw. The same names on every rank.
        world: the job.
    Raises:
        InvalidArgumentError: a value that is neither, or a total count of 0.
        AgreementError: the ranks give different names; raised on every rank.
    """
    return averages.average(state.RANKS, metrics, world.size)


def join(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, world: Topology) -> int:
    """Wait, after this rank's last step, for ranks that still train; then all hold the state of the last one.

    While this rank waits, it adds zeros to the others' gradients, and Horovod still divides by all ranks, so that
    their steps become smaller. To train exactly on data of unknown length, ``shard`` an iterable data set instead.
    Only gradients may be exchanged while a rank waits: no ``average_metrics`` or ``check_agreement`` in the loop.

    Args:
        model, optimizer: as for ``broadcast_state``.
        world: the job.
    Returns:
        The rank that ended last, whose state all have now.
    Raises:
        InvalidArgumentError: an optimizer with ``shard_state=True``: the others wait for what this rank updates.
    """
    if hasattr(optimizer, state.SHARDED):
        raise InvalidArgumentError(
            "with shard_state=True every rank takes every step, since the others wait for what it updates; shard an "
            "iterable data set, or use remainder='exact', instead of join."
        )
    # Horovod makes its zeros there, and all ranks must reduce on one kind of device.
    on_gpu = next((parameter.device.index for parameter in model.parameters() if parameter.is_cuda), -1)
    last = int(hvd.join(on_gpu)) if world.size > 1 else 0
    averaging.forget_agreements()
    broadcast_state(model, optimizer, root=last)
    return last


def record_timeline(
    path: str | os.PathLike[str], steps: range | None = None, *, mark_cycles: bool = False
) -> TimelineSteps:
    """Record Horovod's timeline of some training steps: ``with record_timeline(...) as recording``, around the loop.

    Call ``recording.step()`` on every rank after each step. Horovod must run with HOROVOD_TIMELINE=DYNAMIC
    (``hvdkit launch --env HOROVOD_TIMELINE=DYNAMIC``). For the arguments and errors see ``TimelineSteps``.
    """
    return TimelineSteps(hvd, path, steps, mark_cycles)


def fit(
    model: torch.nn.Module,
    make_optimizer: Callable[[Iterator[torch.nn.Parameter], float], torch.optim.Optimizer],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    train_set: torch.utils.data.Dataset[Any],
    *,
    epochs: int,
    batch_size: int,
    base_lr: float,
    warmup_epochs: float = 0,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    remainder: str = "drop",
    kind: str = "auto",
    seed: int = 0,
) -> list[dict[str, float]]:
    """The eight steps in one call: train ``model`` on all ranks; returns the mean loss of each epoch.

    Args:
        make_optimizer: from parameters and the scaled learning rate, for example ``torch.optim.SGD``.
        loss: mean loss of a batch, from (output, target); with remainder="exact" one for ``weighted_loss``.
        train_set: map-style, gives (x, y).
        epochs, batch_size, base_lr, warmup_epochs: per rank; the rate is scaled linearly.
        checkpoint_dir: where to save after each epoch, and to go on from, on any number of ranks, if there is a
            checkpoint already; the history then begins with the epoch after it.
        remainder, kind, seed: see ``shard`` and ``pin_device``.
    Raises:
        InvalidArgumentError: a number out of range, or a loss that cannot be weighted.
    """
    world = init()  # 1
    model.to(target := pin_device(world, kind)).train()  # 2
    optimizer = distribute(make_optimizer(model.parameters(), scale_lr(base_lr, world)), model)  # 3, 4
    broadcast_state(model, optimizer)  # 5
    checkpoints = Checkpoints(checkpoint_dir) if checkpoint_dir is not None else None  # 6
    loader = shard(train_set, world, batch_size, remainder=remainder, seed=seed)  # 7
    steps = steps_per_epoch(len(train_set), batch_size, world, remainder)  # type: ignore[arg-type]  # 8
    loss_of = weighted_loss(loss) if remainder == "exact" else loss
    schedule = warmup(optimizer, world, steps, warmup_epochs)
    if checkpoints is not None:
        checkpoints.restore(model, optimizer, loader=loader, schedule=schedule)
    history = []
    for epoch in range(loader.epoch, epochs):
        total = 0.0
        for x, y, *weights in record_steps(loader):
            optimizer.zero_grad()
            batch_loss = loss_of(model(x.to(target)), y.to(target), *weights)
            batch_loss.backward()
            optimizer.step()
            schedule.step()
            total += batch_loss.item()
        history.append(average_metrics({"loss": total / steps}, world))
        if checkpoints is not None:
            checkpoints.save(model, optimizer, step=(epoch + 1) * steps, loader=loader)
    return history
