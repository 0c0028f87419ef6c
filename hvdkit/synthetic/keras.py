"""``hvdkit bench synthetic --framework keras``: one rank of it, started by that command."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hvdkit.synthetic.benchmark import BenchmarkSettings, Stopwatch, run_program


def run(settings: BenchmarkSettings) -> tuple[Any, Any]:
    """Train on one random batch with ``fit``, on any backend of Keras 3, and print how fast that is.

    Returns:
        The model and its optimizer, trained.
    Raises:
        MissingFrameworkError: Keras, its backend, or Horovod for it, is missing.
        InvalidArgumentError: Adasum, which Keras' optimizers cannot do.
    """
    import hvdkit.keras as hk  # says what is missing, where ``import keras`` would only fail

    world = hk.init()
    import keras

    from hvdkit.keras.trainer.callbacks import Callback
    from hvdkit.synthetic.tensorflow_models import make_model

    device = hk.pin_device(world, "auto" if settings.cuda else "cpu").lower()
    model = make_model(settings)
    optimizer = keras.optimizers.SGD(hk.scale_lr(0.01, world, settings.rule))
    optimizer = hk.distribute(optimizer, op=settings.op, compression=settings.compression)
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
    import keras

    batch = settings.data(rank)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensors(tuple(map(tf.constant, batch))).repeat()

    return (batch for _ in itertools.count())  # fit takes generators, and no other iterators


if __name__ == "__main__":
    run_program(run)
