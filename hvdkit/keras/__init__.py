"""The eight steps for Keras 3's ``compile`` and ``fit``, on its tensorflow, torch and jax backends.

As released, Horovod 0.28.1's own Keras optimizer does nothing under Keras 3: ``fit`` runs, and no gradient is
averaged. Here the gradients travel over ``horovod.tensorflow``, over ``horovod.torch`` (torch and jax) or, on jax
without it, mpi4py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdkit.core.communicator import OverHorovod
from hvdkit.errors import MissingFrameworkError
from hvdkit.observe.allreduce_counts import COUNTS
from hvdkit.observe.monitor import begin_if_asked
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.learning_rate import scale_lr
from hvdkit.steps.outer import average_weights, wanted
from hvdkit.steps.same_data import require_same_data
from hvdkit.steps.shard_state import require_alone
from hvdkit.steps.shards import Shard, steps_per_epoch
from hvdkit.steps.topology import Topology

try:
    import keras
except ImportError as error:
    missing = getattr(error, "name", None) or "keras"
    raise MissingFrameworkError(
        f"hvdkit.keras needs Keras 3 with the backend of KERAS_BACKEND ({os.environ.get('KERAS_BACKEND', 'tensorflow')}"
        f"), and importing {missing} failed ({error}); run `pip install {missing.split('.')[0]}`, or choose a backend "
        "that is installed."
    ) from error
if int(keras.__version__.split(".")[0]) < 3:
    raise MissingFrameworkError(f"hvdkit.keras needs Keras 3, found {keras.__version__}; run `pip install 'keras>=3'`.")

from hvdkit.keras import data as keras_data
from hvdkit.keras import device, state
from hvdkit.keras import optimizer as averaging
from hvdkit.keras.agreement import CheckAgreement, check_agreement
from hvdkit.keras.checkpoint import Checkpoint, Checkpoints
from hvdkit.keras.elastic import ElasticCommit, ElasticState, run_elastic
from hvdkit.keras.monitor import Monitor
from hvdkit.keras.schedule import LearningRateSchedule, Warmup
from hvdkit.keras.seeds import seed_everything
from hvdkit.keras.trainer import callbacks as keras_callbacks
from hvdkit.keras.trainer import guard
from hvdkit.keras.trainer.callbacks import BroadcastState, RecordSteps, RecordTimeline
from hvdkit.keras.trainer.evaluation import evaluate
from hvdkit.keras.trainer.metrics import AverageMetrics
from hvdkit.keras.transport import TRANSPORT
from hvdkit.tf_shared import keras_optimizer

__all__ = [
    "AverageMetrics",
    "BroadcastState",
    "CheckAgreement",
    "Checkpoint",
    "Checkpoints",
    "ElasticCommit",
    "ElasticState",
    "LearningRateSchedule",
    "Monitor",
    "RecordSteps",
    "RecordTimeline",
    "Topology",
    "Warmup",
    "average_metrics",
    "average_weights",
    "broadcast_state",
    "check_agreement",
    "distribute",
    "evaluate",
    "fit",
    "init",
    "pin_device",
    "run_elastic",
    "scale_lr",
    "seed_everything",
    "shard",
    "shard_files",
    "steps_per_epoch",
    "warmup",
]


# 1 ------------------------------------------------------------------------------------------------------------------


def init() -> Topology:
    """Connect the ranks and say who this process is (step 1). Without a launcher: a job of one process.

    From now on every ``fit`` of this process is guarded, as no training may end unsynchronised unnoticed: ``init``
    replaces ``keras.Model.fit`` by one that runs the original with one more callback. On several ranks it refuses an
    optimizer that is not distributed, ranks that would take different numbers of steps, and losses and train steps that
    undo the weights of ``shard(remainder="exact")``; compares weights and optimizer state before and after the first
    step and at the end; sets BatchNormalization's moving statistics to their mean over the ranks after each epoch;
    gives callbacks the logs of all ranks together; lets Keras' callbacks that write do so on rank 0, with their effects
    on all ranks; lets only rank 0 print progress; and ends all ranks where one stops or fails in mid-epoch. An
    optimizer that is not distributed is refused by ``train_on_batch``, too; another step with one is warned of.

    Raises:
        LauncherError: the launcher's environment is incomplete.
        TopologyMismatchError: the launcher and Horovod (or MPI) disagree about rank or size.
    """
    world = state.start()
    guard.install()
    if TRANSPORT.has_background() and isinstance(TRANSPORT, OverHorovod):
        COUNTS.begin(TRANSPORT.hvd, TRANSPORT)
    begin_if_asked(Monitor, world)
    return world


# 2 ------------------------------------------------------------------------------------------------------------------


def pin_device(world: Topology, kind: str = "auto", threads: int | None = None) -> str:
    """Give this process one GPU, or its share of the CPU cores (step 2); call it right after ``init``.

    TensorFlow and JAX take these settings only before their first operation.

    Args:
        world: the job; ``local_rank`` and ``local_size`` are used.
        kind: "auto" (a GPU where the backend sees one), "gpu" or "cpu".
        threads: compute threads on the CPU; default: OMP_NUM_THREADS, else the usable cores divided by the ranks here.
    Returns:
        The device for ``keras.device``; Keras uses it without, too.
    Raises:
        InvalidArgumentError: an unknown kind, threads < 1, or "gpu" where the backend sees none.
        LauncherError: more processes on this host than GPUs.
    """
    return device.pin(world, kind, threads)


# 3: scale_lr is the neutral one ---------------------------------------------------------------------------------------


def warmup(
    optimizer: Any,
    world: Topology,
    steps_per_epoch: int,
    epochs: float = 5,
    rule: str = "linear",
    after: Callable[[int], float] | None = None,
) -> Warmup:
    """Gradual warmup from the base learning rate to the scaled one (step 3): a callback for ``fit``.

    Args:
        optimizer: one that the model holds; its learning rate is the scaled one, a number from ``scale_lr`` with the
            same rule. For several optimizers give ``fit`` several callbacks.
        world: the job; only ``size`` is used.
        steps_per_epoch: optimizer steps in an epoch, from ``steps_per_epoch``.
        epochs: length of the warmup in epochs; 0 is none.
        rule: the rule that scaled the rate: "linear", "sqrt" or "none".
        after: multiplier by the number of steps since the end of the warmup, for a decay that follows it.
    Raises:
        InvalidArgumentError: a number out of range, an unknown rule, or a rate that follows a schedule of its own.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2.
    """
    keras_optimizer.require_keras_3(optimizer, keras.optimizers.Optimizer, "warmup")
    callback = Warmup(world, steps_per_epoch, epochs, rule, after)
    callback.give(optimizer)
    return callback


# 4 ------------------------------------------------------------------------------------------------------------------


def distribute(
    optimizer: Any,
    *,
    op: str = "average",
    compression: str = "none",
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    process_set: Any = None,
    every: int | None = None,
    outer: str = "nesterov",
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    outer_overlap: int = 0,
    shard_state: bool = False,
) -> Any:
    """Make an optimizer apply the mean of all ranks' gradients (step 4); returns the same object, its state kept.

    Its class becomes a subclass of the user's own. Gradients are combined once in each step, before clipping,
    accumulation, moving averages and the overflow test of a loss scale; with ``gradient_accumulation_steps`` in each
    of the accumulated steps, so that the accumulators, too, are the same on all ranks. Sparse gradients become dense.

    On torch, gradients travel while ``loss.backward()`` computes others, and ``.grad`` is their mean when it returns:
    in steps of ``fit`` and in loops of your own, not in callbacks and after ``fit``, where a rank may be alone. What
    comes by another way (``torch.autograd.grad``) is averaged in ``apply``, also the first step of an optimizer that
    nobody has built; ``optimizer.build(variables)`` comes before that. With ``op="sum"``, ``.grad`` is the mean, and
    ``apply`` adds up.

    ``model.save`` writes what it would write without hvdkit, and ``keras.models.load_model`` gives a plain optimizer:
    to go on training, ``distribute(model.optimizer)``. Of two nested optimizers distribute the outer one
    (``LossScaleOptimizer``; the one that ``compile`` adds under the policy mixed_float16 is taken care of).

    ``jit_compile``: on jax and torch as Keras decides, "auto" included. On TensorFlow, Horovod has no XLA kernel:
    ``fit`` turns it off, with a warning where it was on ("auto" is on for GPUs only).

    Args:
        optimizer: any Keras 3 optimizer.
        op, compression, gradient_predivide_factor: see ``GradientOptions``; not "adasum".
        backward_passes_per_step: 1; Keras accumulates by itself, with the optimizer's gradient_accumulation_steps.
        process_set: combine only over these ranks (``ProcessSet`` of the backend's Horovod); default: all.
        every, outer, outer_lr, outer_momentum, outer_overlap: average gradients within a host (``process_set``, or
            "rank"), and what the weights have become over all ranks every so many steps (DiLoCo), see
            ``hvdkit.torch.distribute`` and docs/slow_networks.md; ``average_weights`` ends a window.
        shard_state: each rank keeps the optimizer's state of its own part of the weights alone, 1 / size of the memory,
            and gives to all what these have become; the weights stay those of an unsharded training. Not with every=
            and process_set=. Refused for an optimizer that updates a variable by what it knows of others. See
            docs/shard_state.md.
    Raises:
        InvalidArgumentError: bad options, a Keras 2 optimizer, one distributed already, one whose state cannot be
            divided, or ``init`` was not called.
    """
    shard_state = require_alone(shard_state, every=every, op=op, process_set=process_set)
    how = {"compression": compression, "op": op, "process_set": process_set}
    outer_options = wanted(every, outer, outer_lr, outer_momentum, outer_overlap, **how)
    sent = compression if outer_options is None else "none"
    options = GradientOptions(op, sent, backward_passes_per_step, gradient_predivide_factor)
    return averaging.distribute(optimizer, options, process_set, outer_options, shard_state=shard_state)


# 5 ------------------------------------------------------------------------------------------------------------------


def broadcast_state(model: Any, optimizer: Any | None = None, root: int = 0) -> None:
    """Give every rank the root's weights and optimizer state, bit for bit (step 5). In ``fit``: ``BroadcastState``.

    Args:
        model: built; weights and statistics are overwritten on all ranks but the root. The states of random
            generators are not; after ``seed_everything`` they, and Keras itself, move from the stream that all ranks
            share to this rank's own, so that dropout differs.
        optimizer: its slots are made where it has none yet, and its whole state (slots, step counter, learning rate)
            is overwritten too. No step is taken. One that the model holds (``compile``'s, an attribute) stands for all
            that it holds. Others by name: ``{"d": d_optimizer, "g": g_optimizer}``. Of several optimizers those
            without slots get them where the root's have them, else in their first step.
        root: rank to copy from.
    Raises:
        InvalidArgumentError: a root that is not a rank, or a model that is not built.
        AgreementError: the ranks' models differ in layers, shapes or types; raised on every rank.
    """
    keras_callbacks.broadcast_state(model, optimizer, root)


# 6: Checkpoints is in checkpoint ------------------------------------------------------------------------------------


# 7 ------------------------------------------------------------------------------------------------------------------


def shard(
    dataset: Any,
    world: Topology,
    batch_size: int,
    *,
    remainder: str = "drop",
    shuffle: bool | int = True,
    seed: int = 0,
) -> Any:
    """This rank's part of the data set, for ``fit`` on every backend (step 7).

    Args:
        dataset: arrays with a common first axis, as ``x``, ``(x, y)`` or ``(x, y, sample_weight)``; x and y may be
            dicts or lists of arrays, on the tensorflow backend also of ragged and string tensors. The same on every
            rank. There, TensorFlow gets a copy of what has rows of 16 KiB and more, but for ``np.memmap``. Or a
            ``tf.data.Dataset`` of such samples, of known or unknown length, which is streamed as
            ``hvdkit.tensorflow.shard`` says, on every backend; on jax over mpi4py only arrays are.
        world: the job; rank and size are used.
        batch_size: samples per step on one rank.
        remainder: what becomes of an epoch's last partial batch, see ``Shard``: "drop", "pad", or "exact", with which
            each batch is ``(x, y, w)`` and Keras weighs the losses by w (m,). That is exact for losses reduced by
            "sum_over_batch_size", Keras' default; on several ranks ``fit`` refuses "sum" and
            "mean_with_sample_weight", which would divide the weights out again. Without y a batch is ``(x, None, w)``,
            for ``add_loss``, or a ``train_step`` of your own that weighs its losses by w; without "exact" it is x, as
            in ``fit(x)``. What layers give to ``add_loss`` is weighed as its batch.
        shuffle: draw a new order each epoch, without any call; ``set_epoch`` exists to repeat one. Of a stream the
            next sample is drawn from a buffer of 1024, or of so many as ``shuffle`` says.
        seed: of the order, the same on every rank.
    Raises:
        InvalidArgumentError: not arrays, arrays of several lengths, an endless data set, or bad numbers.
        AgreementError: the ranks' samples or their order differ; raised on every rank. (All call it, as a collective.)
    """
    if keras_data.is_tf_data(dataset):
        options: dict[str, Any] = {"batch_size": batch_size, "remainder": remainder, "shuffle": shuffle, "seed": seed}
        reach = TRANSPORT, TRANSPORT.total, keras_data.with_weights
        dataset, stream = keras_data.streams().arrays_or_stream(dataset, world, *reach, **options)
        if stream is not None:
            return stream
    arrays = keras_data.as_arrays(dataset)
    leaves = keras.tree.flatten(arrays)
    require_same_data(TRANSPORT, world, tuple(getattr(leaf, "flat_values", leaf) for leaf in leaves))  # of ragged ones
    n_samples = leaves[0].shape[0]
    return keras_data.ShardedData(arrays, Shard(n_samples, world, batch_size, remainder, bool(shuffle), seed))


def shard_files(paths: Iterable[str | os.PathLike[str]], world: Topology) -> Any:
    """This rank's files, as a ``tf.data.Dataset`` of their names; see ``hvdkit.tensorflow.shard_files`` (step 7)."""
    return keras_data.streams().ShardedFiles(paths, world)


# 8: steps_per_epoch is the neutral one -------------------------------------------------------------------------------


def average_metrics(metrics: Mapping[str, Any], world: Topology) -> dict[str, float]:
    """The mean of each metric over all ranks, the same on every rank. In ``fit``: ``AverageMetrics``.

    Args:
        metrics: by name, a number (every rank counts the same) or a pair (sum, count), which gives sum of sums / sum
            of counts: exact whatever each rank saw. The same names on every rank.
        world: the job.
    Raises:
        InvalidArgumentError: a value that is neither, or a total count of 0.
        AgreementError: the ranks give different names; raised on every rank.
    """
    return state.average(metrics, world.size)


def fit(
    model: Any,
    make_optimizer: Callable[[float], Any],
    loss: Any,
    train_set: Any,
    *,
    epochs: int,
    batch_size: int,
    base_lr: float,
    warmup_epochs: float = 0,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    kind: str = "auto",
    seed: int = 0,
) -> list[dict[str, float]]:
    """The eight steps in one call: train ``model`` on all ranks; returns the mean loss of each epoch.

    Args:
        model: a Keras model, built; on a host with GPUs call ``init`` and ``pin_device`` before you make it.
        make_optimizer: from the scaled learning rate, for example ``keras.optimizers.SGD``.
        loss: as for ``compile``.
        train_set: arrays (x, y), see ``shard``.
        epochs, batch_size, base_lr, warmup_epochs: per rank; the rate is scaled linearly.
        checkpoint_dir: where to save after each epoch, and to go on from, on any number of ranks, if there is a
            checkpoint already; the history then begins with the epoch after it.
        kind, seed: see ``pin_device`` and ``shard``.
    Raises:
        InvalidArgumentError: a number out of range.
    """
    world = init()  # 1
    pin_device(world, kind)  # 2
    optimizer = distribute(make_optimizer(scale_lr(base_lr, world)))  # 3, 4
    model.compile(optimizer, loss)
    broadcast_state(model, optimizer)  # 5
    saving = [Checkpoint(checkpoint_dir)] if checkpoint_dir is not None else []  # 6
    data = shard(train_set, world, batch_size, seed=seed)  # 7
    steps = steps_per_epoch(data.share.n_samples, batch_size, world)  # 8
    callbacks = [RecordSteps(), warmup(optimizer, world, steps, warmup_epochs), *saving]
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks).history
    return [{"loss": mean} for mean in history.get("loss", [])]
