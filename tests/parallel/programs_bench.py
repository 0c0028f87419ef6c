"""What each rank of test_bench_real.py does: trains a little and reads what it recorded."""

import os
import time
from pathlib import Path

from lean_imports import lean_imports

from hvdkit.steps import step_files, step_times


def _recorded(directory, rank):
    (own,) = [times for times in step_files.read(Path(directory)) if times.rank == rank]
    assert all(step.asked <= step.given <= step.ended for step in own.steps)
    return len(own.steps), [step.ready is not None and step.ready - step.given for step in own.steps]


def tensorflow(directory):
    os.environ[step_times.VARIABLE] = directory
    with lean_imports():
        import tensorflow as tf

        import hvdkit.tensorflow as hk

    world = hk.init()
    variable = tf.Variable([1.0])

    @tf.function
    def gradient():
        with hk.distribute(tf.GradientTape()) as tape:
            loss = 2 * variable
        return tape.gradient(loss, [variable])[0]

    for take in (gradient, gradient.python_function):
        for _ in hk.record_steps([1, 2, 3]):
            time.sleep(0.3 * world.rank)
            take().numpy()
    return _recorded(directory, world.rank)


def keras(directory):
    os.environ[step_times.VARIABLE] = directory
    with lean_imports():
        import keras
        import numpy as np

        import hvdkit.keras as hk

    world = hk.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.01)), "mse")
    late = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_, **__: time.sleep(0.3 * world.rank))
    data = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")
    model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=[hk.BroadcastState(), hk.RecordSteps(), late])
    return _recorded(directory, world.rank)
