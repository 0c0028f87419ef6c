"""``hvdkit bench synthetic --framework tensorflow``: one rank of it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import keras
import tensorflow as tf

from hvdkit.synthetic.benchmark import BenchmarkSettings, Stopwatch
from hvdkit.synthetic.keras import make_model


def run(settings: BenchmarkSettings) -> tuple[Any, Any]:
    """Train on one random batch, with a step in ``tf.function``, and print how fast that is.

    Returns:
        The model and its optimizer, trained.
    Raises:
        MissingFrameworkError: TensorFlow, or Horovod for it, is missing.
    """
    import hvdkit.tensorflow as hk

    world = hk.init()
    device = hk.pin_device(world, "auto" if settings.cuda else "cpu")
    model = make_model(settings)
    optimizer = keras.optimizers.SGD(hk.scale_lr(0.01, world))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hk.broadcast_state(model, optimizer)

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(x: Any, y: Any) -> Any:
        with hk.distribute(tf.GradientTape(), compression=settings.compression) as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    batch = tuple(map(tf.constant, settings.data(world.rank)))
    sizes = [math.prod(variable.shape) for variable in model.trainable_variables]
    watch = Stopwatch(settings, world, "GPU" if "GPU" in device else "CPU", len(sizes), sum(sizes))
    watch.begin()
    for x, y in hk.record_steps(itertools.repeat(batch, settings.batches)):
        loss = train_step(x, y)
        watch.batch_ended(loss.numpy)
    watch.end()
    return model, optimizer
