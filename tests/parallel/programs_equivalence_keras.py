"""What the ranks of test_equivalence.py train in Keras; each function returns JSON values."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdkit
import hvdkit.keras as hk
from hvdkit.keras.data import ShardedData
from hvdkit.steps.shards import Batch, Shard

SAMPLES, FEATURES, CLASSES, GLOBAL_BATCH, EPOCHS = 53, 6, 3, 12, 3
TWO_EACH = 56  # leaves a rank of 4 two samples at the end, as in the other frameworks


def make_loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # in the floatx of this moment


def make_data(samples: int = SAMPLES) -> tuple[Any, Any]:
    x = np.random.default_rng(5).normal(size=(samples, FEATURES))
    return x.astype(keras.config.floatx()), (x.sum(axis=1) > 0).astype("int64") + (x[:, 0] > 1)


def make_model(seed: int, *, normalised: bool = False) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    middle = [layers.BatchNormalization()] if normalised else []
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(8), *middle, layers.Activation("tanh"), layers.Dense(CLASSES)]
    )


def weights(model: Any) -> list[float]:
    return np.concatenate([variable.numpy().reshape(-1) for variable in model.trainable_variables]).tolist()


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, **options)


def adam() -> Any:
    return keras.optimizers.Adam(0.01, weight_decay=0.01)


class EqualWeights(ShardedData):
    """The mistake: every sample counts the same on its rank, however few the rank has."""

    def _contents(self, batch: Batch) -> tuple[Any, ...]:
        x, y, w = super()._contents(batch)
        return x, y, np.ones_like(w)


def train(
    world: hvdkit.Topology,
    make_optimizer: Callable[[], Any] = sgd,
    *,
    samples: int = SAMPLES,
    epochs: int = EPOCHS,
    normalised: bool = False,
    wrong: str = "",
    **options: Any,
) -> list[float]:
    """Final weights of a training on GLOBAL_BATCH samples a step; every rank begins with other weights."""
    model = make_model(world.rank, normalised=normalised)
    optimizer = make_optimizer()
    model.compile(optimizer if wrong == "no average" else hk.distribute(optimizer, **options), make_loss())
    data = hk.shard(make_data(samples), world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)
    if wrong == "equal weights":
        data = EqualWeights(make_data(samples), data.share)
    # hvdkit's own fit refuses two of the mistakes: an optimizer that does not average, and weights that differ.
    fit = keras.Model.fit._hvdkit_plain if wrong else keras.Model.fit
    callbacks = [] if wrong == "no broadcast" else [hk.BroadcastState()]
    fit(model, data, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return weights(model)


def train_in_float32(world: hvdkit.Topology) -> list[float]:
    keras.config.set_floatx("float32")
    try:
        return train(world)
    finally:
        keras.config.set_floatx("float64")


def train_in_parts(parts: int) -> list[float]:
    """In one process: BatchNormalization over each of ``parts`` parts of the global batch, as that many ranks would."""
    model, optimizer, loss_of = make_model(0, normalised=True), sgd(), make_loss()
    x, y = make_data(TWO_EACH)
    batch_size = GLOBAL_BATCH // parts
    shares = [
        Shard(TWO_EACH, hvdkit.Topology(rank, parts), batch_size, remainder="exact", seed=3) for rank in range(parts)
    ]
    for epoch in range(EPOCHS):
        for batches in zip(*(share.batches(epoch) for share in shares), strict=True):
            with tf.GradientTape() as tape:
                losses = []
                for batch in batches:
                    w = np.full(len(batch.indices), batch.weight)
                    losses.append(loss_of(y[batch.indices], model(x[batch.indices], training=True), w))
                loss = tf.add_n(losses) / parts
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return weights(model)


def evaluate(world: hvdkit.Topology) -> dict[str, float]:
    """Every sample once, by a model that is the same on all ranks."""
    model = make_model(0)
    model.compile(loss=make_loss(), metrics=["accuracy"])
    return {"accuracy": hk.evaluate(model, make_data(49), world, 4)["accuracy"]}


def everything() -> dict[str, Any]:
    keras.config.set_floatx("float64")
    world = hk.init()
    trained = {
        "sgd": train(world),
        "adam": train(world, adam),
        "float32": train_in_float32(world),
        "filler": train(world, samples=49),
        "accumulation": train(world, lambda: sgd(gradient_accumulation_steps=2), samples=48, epochs=2 * EPOCHS),
        "fp16": train(world, compression="fp16"),
        "predivide": train(world, gradient_predivide_factor=2.0),
        "local batch norm": train(world, samples=TWO_EACH, normalised=True),
    }
    wrong = {mistake: train(world, wrong=mistake) for mistake in ("equal weights", "no broadcast", "no average")}
    by_parts = {str(parts): train_in_parts(parts) for parts in (2, 3, 4)} if world.size == 1 else {}
    return {
        "trained": trained,
        "wrong": wrong,
        "parts": by_parts,
        "begin": weights(make_model(0)),
        "metrics": evaluate(world),
        "over mpi": hvd.mpi_enabled(),
    }
