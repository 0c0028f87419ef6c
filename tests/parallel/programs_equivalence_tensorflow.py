"""What the ranks of test_equivalence.py train in TensorFlow; each function returns JSON values."""

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdkit
import hvdkit.tensorflow as hk
from hvdkit.steps.shards import Shard

SAMPLES, FEATURES, CLASSES, GLOBAL_BATCH, EPOCHS = 53, 6, 3, 12, 3
TWO_EACH = 56  # leaves a rank of 4 two samples at the end: one alone has no variance


def make_data(samples: int = SAMPLES, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(5).normal(size=(samples, FEATURES))
    return x.astype(dtype), (x.sum(axis=1) > 0).astype(np.int64) + (x[:, 0] > 1)


def make_model(seed: int, dtype: str, *, normalised: bool) -> keras.Model:
    keras.config.set_floatx(dtype)  # also of the losses that are made from now on
    keras.utils.set_random_seed(seed)
    middle = [keras.layers.BatchNormalization()] if normalised else []
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8),
            *middle,
            keras.layers.Activation("tanh"),
            keras.layers.Dense(CLASSES),
        ]
    )


def make_loss() -> Callable[..., Any]:
    return hk.weighted_loss(keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def weights(model: keras.Model) -> list[float]:
    return np.concatenate([variable.numpy().astype(float).ravel() for variable in model.trainable_variables]).tolist()


def sgd(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, **options)


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, weight_decay=0.01)


def train(
    world: hvdkit.Topology,
    make_optimizer: Callable[..., keras.optimizers.Optimizer] = sgd,
    *,
    dtype: str = "float64",
    samples: int = SAMPLES,
    normalised: bool = False,
    passes: int = 1,
    wrong: str = "",
    **options: Any,
) -> list[float]:
    """Final weights of a training on GLOBAL_BATCH samples a step; every rank begins with other weights."""
    model = make_model(world.rank, dtype, normalised=normalised)
    loss_of = make_loss()
    if passes > 1:  # the optimizer adds the gradients up, so that it is the one to distribute
        optimizer = hk.distribute(make_optimizer(gradient_accumulation_steps=passes), **options)
    else:
        optimizer = make_optimizer()
    if wrong != "no broadcast":
        hk.broadcast_state(model, optimizer)
    data = make_data(samples, dtype)
    dataset = hk.shard(data, world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)

    def step(x: Any, y: Any, w: Any) -> None:
        tape = tf.GradientTape()
        with tape:
            weighted = tf.ones_like(w) if wrong == "equal weights" else w
            loss = loss_of(y, model(x, training=True), weighted)
        if passes == 1 and wrong != "no average":
            tape = hk.distribute(tape, **options)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    # AutoGraph takes longer than the training; the trainings of test_tensorflow.py go through it.
    step = tf.function(step, input_signature=dataset.element_spec, autograph=False)
    for _ in range(EPOCHS * passes):
        for x, y, w in dataset:
            step(x, y, w)
    return weights(model)


def train_in_parts(parts: int) -> list[float]:
    """In one process: BatchNormalization over each of ``parts`` parts of the global batch, as that many ranks would."""
    model = make_model(0, "float64", normalised=True)
    optimizer, loss_of, (x, y) = sgd(), make_loss(), make_data(TWO_EACH)
    variables = model.trainable_variables
    batch_size = GLOBAL_BATCH // parts
    shares = [
        Shard(TWO_EACH, hvdkit.Topology(rank, parts), batch_size, remainder="exact", seed=3) for rank in range(parts)
    ]
    for epoch in range(EPOCHS):
        for batches in zip(*(share.batches(epoch) for share in shares), strict=True):
            with tf.GradientTape() as tape:
                losses = [
                    loss_of(y[one.indices], model(x[one.indices], training=True), [one.weight] * len(one.indices))
                    for one in batches
                ]
                loss = tf.add_n(losses) / parts
            optimizer.apply(tape.gradient(loss, variables), variables)
    return weights(model)


def evaluate(world: hvdkit.Topology) -> dict[str, float]:
    """Every sample once, by a model that is the same on all ranks."""
    model = make_model(0, "float64", normalised=False)
    hits = samples = 0
    for x, y, w in hk.shard(make_data(49), world, 4, remainder="exact", shuffle=False):
        right = (tf.argmax(model(x), axis=1) == y)[w > 0].numpy()
        hits, samples = hits + int(right.sum()), samples + len(right)
    return hk.average_metrics({"accuracy": (hits, samples)}, world)


def everything() -> dict[str, Any]:
    world = hk.init()
    hk.pin_device(world, "cpu")
    trained = {
        "sgd": train(world),
        "adam": train(world, adam),
        "float32": train(world, dtype="float32"),
        "filler": train(world, samples=49),
        "accumulation": train(world, samples=48, passes=2),
        "fp16": train(world, compression="fp16"),
        "predivide": train(world, gradient_predivide_factor=2.0),
        "local batch norm": train(world, samples=TWO_EACH, normalised=True),
    }
    wrong = {mistake: train(world, wrong=mistake) for mistake in ("equal weights", "no broadcast", "no average")}
    by_parts = {str(parts): train_in_parts(parts) for parts in (2, 3, 4)} if world.size == 1 else {}
    begin = weights(make_model(0, "float64", normalised=False))
    return {
        "trained": trained,
        "wrong": wrong,
        "parts": by_parts,
        "begin": begin,
        "metrics": evaluate(world),
        "over mpi": hvd.mpi_enabled(),
    }
