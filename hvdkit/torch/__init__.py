"""The eight steps for PyTorch, over ``horovod.torch``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvdkit.errors import InvalidArgumentError, MissingFrameworkError
from hvdkit.observe.allreduce_counts import COUNTS
from hvdkit.observe.recording import TimelineSteps
from hvdkit.observe.step_files import record_steps
from hvdkit.observe.torch_profile import profile
from hvdkit.steps import metrics as averages
from hvdkit.steps import passes, starting
from hvdkit.steps.learning_rate import scale_lr
from hvdkit.steps.outer import average_weights, end_windows
from hvdkit.steps.shards import steps_per_epoch
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

from hvdkit.torch import schedule as rates
from hvdkit.torch import state, torchmetrics
from hvdkit.torch.agreement import CheckAgreement, check_agreement
from hvdkit.torch.backward import tell_how_many
from hvdkit.torch.batch_norm import average_statistics, gather, sync_batch_norm
from hvdkit.torch.buckets import FUSION_BYTES
from hvdkit.torch.checkpoint import Checkpoints
from hvdkit.torch.data import shard
from hvdkit.torch.ddp import init_process_group
from hvdkit.torch.device import Precision, pin_device
from hvdkit.torch.divergence import COPIES, broadcast_each_step, end_each_step
from hvdkit.torch.elastic import ElasticState, run_elastic
from hvdkit.torch.loss import weighted_loss
from hvdkit.torch.monitor import Monitor, begin_if_asked
from hvdkit.torch.optimizer import count_steps, distribute, forget_agreements, no_sync
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


# 2: pin_device is in device -------------------------------------------------------------------------------------------


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


# 4: distribute is in optimizer ---------------------------------------------------------------------------------------


# 5 ------------------------------------------------------------------------------------------------------------------


def broadcast_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, root: int = 0, *, buffers: str = "once"
) -> None:
    """Give every rank the root's parameters, buffers and optimizer state, bit for bit (step 5).

    In place: the optimizer's groups, its states and the dense tensors in them stay the objects that a scheduler may
    hold.
    After ``seed_everything`` PyTorch's generators move from the stream that all ranks share to this rank's own.

    Args:
        model: parameters and buffers are overwritten on all ranks but the root.
        optimizer: its whole state (slots, step counters, learning rates) is overwritten too. Unlike Horovod's own
            function this one takes no step to make a state that is not there yet.
        root: rank to copy from.
        buffers: "once", or "each step": in training every rank also gets the root's buffers (not those registered with
            ``persistent=False``) before each forward of the model, as with DistributedDataParallel. Call it then
            equally often on every rank. The next ``broadcast_state`` without it ends that.
    Raises:
        InvalidArgumentError: a root that is not a rank, several models or optimizers, lazy parameters that have no
            shape yet, or unknown ``buffers``.
        AgreementError: the ranks' models differ in names, shapes or types, or their optimizers in kind or parameter
            groups; raised on every rank.
        RootError: the root's optimizer holds what cannot be sent; the root raises the reason.
    """
    state.require_torch(model, optimizer)
    if buffers not in ("once", "each step"):
        raise InvalidArgumentError(f"buffers must be once or each step, got {buffers!r}.")
    end_windows()
    tell_how_many(RANKS, hvd.global_process_set)
    with COPIES.found_after(model):
        state.broadcast(model, optimizer, root)
    end_each_step(model)
    if buffers == "each step" and hvd.size() > 1:
        broadcast_each_step(model, root)
    if optimizer is not None:
        count_steps(optimizer)
        passes.look_at_weights(model, state.sample_of)


# 6: Checkpoints is in checkpoint ------------------------------------------------------------------------------------


# 7: shard is in data --------------------------------------------------------------------------------------------------


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
    forget_agreements()
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
    precision: str = "fp32",
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
        precision: "fp32", or with PyTorch's autocast "bf16" or "fp16", the latter with a GradScaler.
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
    computing = Precision(precision, target)
    if checkpoints is not None:
        computing.go_on(checkpoints.restore(model, optimizer, loader=loader, schedule=schedule))
    history = []
    for epoch in range(loader.epoch, epochs):
        total = 0.0
        for x, y, *weights in record_steps(loader):
            with computing.autocast:
                batch_loss = loss_of(model(x.to(target)), y.to(target), *weights)
            total += computing.step(batch_loss, optimizer)
            schedule.step()
        history.append(average_metrics({"loss": total / steps}, world))
        if checkpoints is not None:
            checkpoints.save(model, optimizer, step=(epoch + 1) * steps, loader=loader, extra=computing.state())
    return history
