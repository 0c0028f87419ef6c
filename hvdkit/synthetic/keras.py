"""``hvdkit bench synthetic --framework keras``: one rank of it, and the models in Keras 3, for TensorFlow too."""

from __future__ import annotations

import itertools
import math
from typing import Any

import keras
from keras import layers

from hvdkit.synthetic.benchmark import EXPANSION, HIDDEN, RESNET50, BenchmarkSettings, Stopwatch, bottlenecks, projected


def run(settings: BenchmarkSettings) -> tuple[Any, Any]:
    """Train on one random batch with ``fit``, on any backend of Keras 3, and print how fast that is.

    Returns:
        The model and its optimizer, trained.
    Raises:
        MissingFrameworkError: Keras, its backend, or Horovod for it, is missing.
    """
    import hvdkit.keras as hk  # needs Horovod, which the models do not
    from hvdkit.keras.trainer.callbacks import Callback

    world = hk.init()
    device = hk.pin_device(world, "auto" if settings.cuda else "cpu").lower()
    model = make_model(settings)
    optimizer = keras.optimizers.SGD(hk.scale_lr(0.01, world))
    optimizer = hk.distribute(optimizer, compression=settings.compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    sizes = [math.prod(variable.shape) for variable in model.trainable_variables]
    watch = Stopwatch(settings, world, "CPU" if "cpu" in device else "GPU", len(sizes), sum(sizes))

    class Timing(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            watch.begin()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            watch.batch_ended(lambda: keras.ops.convert_to_numpy(optimizer.iterations.value))

    callbacks = [hk.BroadcastState(), hk.RecordSteps(), Timing()]
    model.fit(_batches(settings, world.rank), steps_per_epoch=settings.batches, verbose=0, callbacks=callbacks)
    watch.end()
    return model, optimizer


def _batches(settings: BenchmarkSettings, rank: int) -> Any:
    """The same batch again and again, without a copy where TensorFlow reads it."""
    batch = settings.data(rank)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensors(tuple(map(tf.constant, batch))).repeat()

    return (batch for _ in itertools.count())  # fit takes generators, and no other iterators


def make_model(settings: BenchmarkSettings) -> Any:
    """The model with random weights; takes (batch, height, width, channels), or (batch, features), gives logits."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(settings.shape)
    if settings.model == RESNET50:
        x = _resnet50(inputs)
    elif settings.model == "cnn":
        x = layers.Conv2D(64, 3, activation="relu")(layers.Conv2D(32, 3, activation="relu")(inputs))
        x = layers.Flatten()(layers.Dropout(0.25)(layers.MaxPooling2D(2)(x)))
        x = layers.Dropout(0.5)(layers.Dense(128, activation="relu")(x))
    else:
        x = inputs
        for width in HIDDEN[settings.model]:
            x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(settings.classes)(x))


def _convolution(x: Any, outputs: int, size: int, stride: int = 1) -> Any:
    """Without bias, since batch normalization has one."""
    x = layers.Conv2D(outputs, size, stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def _resnet50(inputs: Any) -> Any:
    x = layers.ReLU()(_convolution(inputs, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for channels, inner, stride in bottlenecks():
        inside = layers.ReLU()(_convolution(x, inner, 1))
        inside = layers.ReLU()(_convolution(inside, inner, 3, stride))
        inside = _convolution(inside, EXPANSION * inner, 1)
        beside = _convolution(x, EXPANSION * inner, 1, stride) if projected(channels, inner, stride) else x
        x = layers.ReLU()(layers.Add()([inside, beside]))
    return layers.GlobalAveragePooling2D()(x)
