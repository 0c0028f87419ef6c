"""The eight steps for loops of your own in TensorFlow, over ``horovod.tensorflow``; Keras's fit: ``hvdkit.keras``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from hvdkit.core.communicator import ALLREDUCE
from hvdkit.errors import InvalidArgumentError, MissingFrameworkError
from hvdkit.observe.allreduce_counts import COUNTS
from hvdkit.observe.monitor import begin_if_asked
from hvdkit.observe.recording import TimelineSteps
from hvdkit.observe.step_files import record_steps
from hvdkit.steps import metrics as averages
from hvdkit.steps import passes, starting
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.learning_rate import scale_lr
from hvdkit.steps.outer import average_weights, end_windows, group_of, wanted
from hvdkit.steps.shard_state import require_alone
from hvdkit.steps.shards import Shard, steps_per_epoch
from hvdkit.steps.topology import Topology

try:
    import tensorflow as tf
except ImportError as error:
    raise MissingFrameworkError(
        "hvdkit.tensorflow needs TensorFlow, which cannot be imported; run `pip install tensorflow`."
    ) from error
try:
    import keras  # noqa: F401 - TensorFlow itself imports it, and goes on where its backend is missing
except ImportError as error:
    raise MissingFrameworkError(
        f"hvdkit.tensorflow needs Keras 3, and importing it failed ({error}); run `pip install keras`, or set "
        "KERAS_BACKEND=tensorflow."
    ) from error
try:
    import horovod.tensorflow as hvd
except ImportError as error:
    raise MissingFrameworkError(
        f"hvdkit.tensorflow needs Horovod built for TensorFlow {tf.__version__}, and importing it failed ({error}); "
        "run `hvdkit install`, or `hvdkit doctor` for the reason."
    ) from error

from hvdkit.tensorflow import data, device, divergence, private, state
from hvdkit.tensorflow import optimizer as averaging
from hvdkit.tensorflow import schedule as rates
from hvdkit.tensorflow.agreement import CheckAgreement, check_agreement
from hvdkit.tensorflow.checkpoint import Checkpoints
from hvdkit.tensorflow.elastic import ElasticState, run_elastic
from hvdkit.tensorflow.loss import weighted_loss
from hvdkit.tensorflow.monitor import Monitor
from hvdkit.tensorflow.seeds import seed_everything
from hvdkit.tensorflow.state import RANKS, average_statistics, numbered_names
from hvdkit.tf_shared import keras_optimizer, keras_outer, keras_sharded, tf_ranks
from hvdkit.tf_shared import tf_streams as streams

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
    "init",
    "join",
    "pin_device",
    "record_steps",
    "record_timeline",
    "run_elastic",
    "scale_lr",
    "seed_everything",
    "shard",
    "shard_files",
    "steps_per_epoch",
    "warmup",
    "weighted_loss",
]


# 1 ------------------------------------------------------------------------------------------------------------------


def init() -> Topology:
    """Start Horovod and say who this process is (step 1). Without a launcher: a job of one process.

    Raises:
        LauncherError: the launcher's environment is incomplete.
        TopologyMismatchError: the launcher and Horovod disagree about rank or size.
    """
    world = starting.start(hvd, os.environ)
    COUNTS.begin(hvd, state.RANKS)
    begin_if_asked(Monitor, world)
    return world


# 2 ------------------------------------------------------------------------------------------------------------------


def pin_device(world: Topology, kind: str = "auto", threads: int | None = None) -> str:
    """Give this process one GPU, whose memory it takes as needed, or its share of the CPU cores (step 2).

    TensorFlow takes these settings only before it has made its first tensor or variable: call this right after
    ``init``. Where that is too late and only the default number of threads would change, there is a warning.

    Args:
        world: the job; ``local_rank`` and ``local_size`` are used.
        kind: "auto" (a GPU where TensorFlow sees one), "gpu" or "cpu".
        threads: of one operation, and operations at once, on the CPU; default: what ``tf.config.threading`` was set
            to, else OMP_NUM_THREADS, else the usable cores divided by the ranks here.
    Returns:
        The device for ``tf.device``; TensorFlow uses it without, too.
    Raises:
        InvalidArgumentError: an unknown kind, threads < 1, "gpu" where TensorFlow sees none, or TensorFlow has
            started with other settings.
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
) -> rates.Warmup:
    """Gradual warmup from the base learning rate to the scaled one (step 3); call ``.step()`` after every step.

    Args:
        optimizer: a Keras optimizer; its learning rate is the scaled one, a number from ``scale_lr`` with the same
            rule. Make the warmup before a checkpoint is restored, and give it to ``restore``.
        world: the job; only ``size`` is used.
        steps_per_epoch: optimizer steps in an epoch, from ``steps_per_epoch``.
        epochs: length of the warmup in epochs; 0 is none.
        rule: the rule that scaled the rate: "linear", "sqrt" or "none".
        after: multiplier by the number of steps since the end of the warmup, for a decay that follows it.
    Raises:
        InvalidArgumentError: a number out of range, an unknown rule, a rate that follows a schedule of its own, or a
            call inside ``tf.function``, where it would act once.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2.
    """
    return rates.Warmup(optimizer, world, steps_per_epoch, epochs, rule, after)


# 4 ------------------------------------------------------------------------------------------------------------------


def distribute(
    tape_or_optimizer: Any,
    *,
    op: str = "average",
    compression: str = "none",
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    groups: int = 1,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    every: int | None = None,
    outer: str = "nesterov",
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    outer_overlap: int = 0,
    shard_state: bool = False,
) -> Any:
    """A tape whose ``gradient``, or an optimizer whose ``apply``, uses the mean of all ranks' gradients (step 4).

    Distribute one of the two. The tape can be distributed before or after it has recorded, eagerly and inside
    ``tf.function`` (without ``jit_compile=True``: Horovod has no XLA operations); to clip, clip what ``gradient``
    returns. A distributed optimizer clips by itself, after averaging, and refuses what ``tf.clip_by_*`` returns.

    Args:
        tape_or_optimizer: a ``tf.GradientTape``, or a Keras 3 optimizer to ``apply`` or ``apply_gradients`` by hand.
        op, compression, gradient_predivide_factor: see ``GradientOptions``.
        backward_passes_per_step: 1 for a tape, which holds one pass: add up the gradients yourself, or give the
            optimizer ``gradient_accumulation_steps``.
        groups: number of groups of gradients that are reduced together. One adds up in the same order in every run;
            with more, the first travel while ``tf.function`` still computes the last.
        sparse_as_dense: reduce ``tf.IndexedSlices`` (of an embedding) as dense tensors. Otherwise the ranks' rows are
            collected and those of the same index added, so that both ways give the same step.
        process_set: reduce only over these ranks (``horovod.tensorflow.ProcessSet``); default: all.
        every, outer, outer_lr, outer_momentum, outer_overlap: (an optimizer) average gradients within a host
            (``process_set``, or "rank"), and what the weights have become over all ranks every so many steps (DiLoCo),
            see ``hvdkit.torch.distribute`` and docs/slow_networks.md; ``average_weights`` ends a window.
        shard_state: (an optimizer) each rank keeps the optimizer's state of its own part of the weights alone, see
            ``hvdkit.keras.distribute`` and docs/shard_state.md.
    Raises:
        InvalidArgumentError: bad options, something that is neither, one that is distributed already, or an optimizer
            whose state cannot be divided.
    """
    if require_alone(shard_state, every=every, op=op, process_set=process_set) and isinstance(
        tape_or_optimizer, (tf.GradientTape, averaging.DistributedTape)
    ):
        raise InvalidArgumentError(
            "shard_state=True divides the state of an optimizer, which a tape has not; distribute the optimizer."
        )
    how = {"compression": compression, "op": op, "process_set": process_set}
    outer_options = wanted(every, outer, outer_lr, outer_momentum, outer_overlap, **how)
    if outer_options is not None:
        if isinstance(tape_or_optimizer, tf.GradientTape):
            raise InvalidArgumentError(
                "every= averages weights, which a tape does not change; distribute the optimizer."
            )
        process_set = group_of(starting.of(hvd, ""), RANKS, process_set, hvd)
        compression = "none"
    options = GradientOptions(op, compression, backward_passes_per_step, gradient_predivide_factor)
    reduction = averaging.Reduction(options, groups, sparse_as_dense, process_set or hvd.global_process_set)
    if isinstance(tape_or_optimizer, averaging.DistributedTape):
        raise InvalidArgumentError("this tape is distributed already; call distribute once.")
    averaging.expect_steps()
    if not isinstance(tape_or_optimizer, tf.GradientTape):
        private.mark()
        reduce = partial(averaging.look_and_reduce_once, reduction=reduction)
        members = process_set and process_set.ranks
        steps = shard = None
        if shard_state and hvd.size() > 1:
            shard = partial(keras_sharded.shard, rank=hvd.rank(), size=hvd.size(), share=tf_ranks.share)
        if outer_options is not None:
            steps = keras_outer.KerasOuterLoop(outer_options, tape_or_optimizer, RANKS, numbered_names)
        return keras_optimizer.distribute_optimizer(tape_or_optimizer, options, reduce, members, steps, shard)
    if options.backward_passes_per_step != 1:
        raise InvalidArgumentError(
            f"a tape holds one backward pass, got backward_passes_per_step={options.backward_passes_per_step}; add up "
            "the gradients, or give the optimizer gradient_accumulation_steps and distribute the optimizer."
        )
    return averaging.DistributedTape(tape_or_optimizer, reduction)


# 5 ------------------------------------------------------------------------------------------------------------------


def broadcast_state(model: Any, optimizer: Any | None = None, root: int = 0) -> None:
    """Give every rank the root's weights and optimizer state, bit for bit (step 5).

    Args:
        model: a Keras model or layer, a ``tf.Module``, or a list of variables, built; all variables are overwritten
            on all ranks but the root. The states of random generators stay each rank's own, so that dropout differs;
            after ``seed_everything`` they, and TensorFlow's seed, move from the stream that all ranks share to this
            rank's own.
        optimizer: a Keras optimizer; its slots are made where it has none yet, and its whole state (slots, step
            counter, learning rate) is overwritten too. No step is taken. Several go by name, here as in all that
            takes an optimizer (but ``warmup``, one for each): ``{"d": d_optimizer, "g": g_optimizer}``; those without
            slots get them where the root's have them, else in their first step.
        root: rank to copy from.
    Raises:
        InvalidArgumentError: a root that is not a rank, a model that is not built, or a call inside ``tf.function``.
        AgreementError: the ranks' models differ in names, shapes or types; raised on every rank.
    """
    end_windows()
    state.broadcast(model, optimizer, root)
    if optimizer is not None:
        state.count_steps(optimizer)
    passes.look_at_weights(model, state.sample_of)


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
) -> data.ShardedDataset | streams.ShardedStream:
    """A ``tf.data.Dataset`` of batches of this rank's part of the data set (step 7).

    Args:
        dataset: arrays with a common first axis, such as ``(x, y)``; ``np.memmap`` works and stays on disk. Or a
            ``tf.data.Dataset`` of single samples, the same in the same order on every rank, or built on what
            ``shard_files`` returned. It is streamed, never read into memory, whether its length is known or not; but
            for at most 64 MiB of known length and shapes, which are read once, here, and kept as arrays. What
            ``from_tensor_slices`` made, with nothing behind it, counts as its arrays.
        world: the job; rank and size are used.
        batch_size: samples per step on one rank.
        remainder: what becomes of an epoch's last partial batch, see ``Shard``: "drop", "pad", or "exact", with which
            each batch is ``(x, y, w)``, w (m,), for ``weighted_loss``. w is float64 where the first floating part of
            a sample is, else float32. Of a stream all ranks take as many steps: before each, and while the one before
            computes, they ask each other who has samples left.
        shuffle: draw a new order each epoch, without any call; ``set_epoch`` exists to resume. Of a stream the next
            sample is drawn from a buffer of 1024, or of so many as ``shuffle`` says.
        seed: of the order, the same on every rank.
    Raises:
        InvalidArgumentError: an endless data set, arrays of several lengths, or bad numbers.
        AgreementError: the ranks' samples or their order differ, here or (of a stream) in the first steps; raised on
            every rank. (All call it, as a collective.)
    """
    options: dict[str, Any] = {"batch_size": batch_size, "remainder": remainder, "shuffle": shuffle, "seed": seed}
    totals = partial(state.RANKS.background, ALLREDUCE)
    arrays, stream = streams.arrays_or_stream(dataset, world, state.RANKS, totals, streams.with_weights, **options)
    if stream is not None:
        return stream
    n_samples = tf.nest.flatten(arrays)[0].shape[0]
    return data.ShardedDataset(arrays, Shard(n_samples, world, batch_size, remainder, bool(shuffle), seed))


def shard_files(paths: Iterable[str | os.PathLike[str]], world: Topology) -> streams.ShardedFiles:
    """This rank's files, as a ``tf.data.Dataset`` of their names: every size-th from the rank-th on (step 7).

    So each rank opens and reads only its own files; ``shard`` knows what is built on it::

        files = hk.shard_files(sorted(glob("train-*.tfrecord")), world)
        dataset = hk.shard(tf.data.TFRecordDataset(files).map(parse), world, 32, remainder="exact")

    Args:
        paths: the same on every rank, in the same order, at least one for each.
        world: the job; rank and size are used.
    Raises:
        InvalidArgumentError: fewer files than ranks, or one twice.
    """
    return streams.ShardedFiles(paths, world)


# 8: steps_per_epoch is the neutral one -------------------------------------------------------------------------------


def average_metrics(metrics: Mapping[str, Any], world: Topology) -> dict[str, float]:
    """The mean of each metric over all ranks, the same on every rank.

    Args:
        metrics: by name, a number (every rank counts the same) or a pair (sum, count), which gives sum of sums / sum
            of counts: exact whatever each rank saw. The same names on every rank.
        world: the job.
    Raises:
        InvalidArgumentError: a value that is neither, a total count of 0, or a call inside ``tf.function``.
        AgreementError: the ranks give different names; raised on every rank.
    """
    state.require_eager("average_metrics")
    return averages.average(state.RANKS, metrics, world.size)


def join(model: Any, optimizer: Any | None, world: Topology) -> int:
    """Wait, after this rank's last step, for ranks that still train; then all hold the state of the last one.

    While this rank waits, it adds zeros to the others' gradients, and Horovod still divides by all ranks, so that
    their steps become smaller. To train exactly on uneven data, ``shard`` arrays with remainder="exact" instead.
    Only dense gradients may be exchanged while a rank waits: no ``average_metrics`` or ``check_agreement`` in the loop,
    ``sparse_as_dense=True`` for embeddings, and not op="adasum".

    Args:
        model, optimizer: as for ``broadcast_state``.
        world: the job.
    Returns:
        The rank that ended last, whose state all have now.
    Raises:
        InvalidArgumentError: a call inside ``tf.function``, or an optimizer with ``shard_state=True``.
    """
    state.require_eager("join")
    if any(len(keras_sharded.shared_variables(one)) < len(one.variables) for one in state.by_name(optimizer).values()):
        raise InvalidArgumentError(
            "with shard_state=True every rank takes every step, since the others wait for what it updates; shard an "
            "iterable data set, or use remainder='exact', instead of join."
        )
    last = int(hvd.join()) if world.size > 1 else 0
    divergence.forget()
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
    model: Any,
    make_optimizer: Callable[[float], Any],
    loss: Callable[[Any, Any], Any],
    train_set: Any,
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
        model: a Keras model, built; on a host with GPUs call ``init`` and ``pin_device`` before you make it.
        make_optimizer: from the scaled learning rate, for example ``keras.optimizers.SGD``.
        loss: mean loss of a batch, from (target, output) as in Keras; with remainder="exact" one for
            ``weighted_loss``. What the model adds (regularizers) is added.
        train_set: gives (x, y). For this, ``remainder``, ``kind`` and ``seed`` see ``shard`` and ``pin_device``.
        epochs, batch_size, base_lr, warmup_epochs: per rank; the rate is scaled linearly.
        checkpoint_dir: where to save after each epoch, and to go on from, on any number of ranks, if there is a
            checkpoint already; the history then begins with the epoch after it.
    Raises:
        InvalidArgumentError: a number out of range, or a loss that cannot be weighted.
    """
    pin_device(world := init(), kind)  # 1, 2
    broadcast_state(model, optimizer := make_optimizer(scale_lr(base_lr, world)))  # 3, 5
    checkpoints = Checkpoints(checkpoint_dir) if checkpoint_dir is not None else None  # 6
    dataset = shard(train_set, world, batch_size, remainder=remainder, seed=seed)  # 7
    steps = steps_per_epoch(dataset.n_samples, batch_size, world, remainder)  # 8
    loss_of = weighted_loss(loss) if remainder == "exact" else loss
    schedule = warmup(optimizer, world, steps, warmup_epochs)
    if checkpoints is not None:
        checkpoints.restore(model, optimizer, loader=dataset, schedule=schedule)

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def train_step(x: Any, y: Any, *weights: Any) -> Any:
        with distribute(tf.GradientTape()) as tape:  # 4
            batch_loss = tf.add_n([loss_of(y, model(x, training=True), *weights), *model.losses])
        optimizer.apply(tape.gradient(batch_loss, model.trainable_variables), model.trainable_variables)
        return batch_loss

    losses = dict.fromkeys(range(dataset.epoch, epochs), 0.0)
    for epoch in losses:
        for batch in record_steps(dataset):
            losses[epoch] += float(train_step(*batch)) / steps
            schedule.step()
        if checkpoints is not None:
            checkpoints.save(model, optimizer, step=(epoch + 1) * steps, loader=dataset)
    return [average_metrics({"loss": loss}, world) for loss in losses.values()]
