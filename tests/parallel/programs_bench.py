"""What each rank of test_bench_real.py does: trains a little and reads what it recorded."""

import os
from pathlib import Path

from hvdkit.steps import step_times


def _recorded(directory, rank):
    (own,) = [times for times in step_times.read(Path(directory)) if times.rank == rank]
    assert all(step.asked <= step.given <= step.ended for step in own.steps)
    return len(own.steps)


def tensorflow(directory):
    os.environ[step_times.VARIABLE] = directory
    import hvdkit.tensorflow as hk

    world = hk.init()
    for _ in range(2):
        for _ in hk.record_steps([1, 2, 3]):
            pass
    return _recorded(directory, world.rank)


def keras(directory):
    os.environ[step_times.VARIABLE] = directory
    import keras
    import numpy as np

    import hvdkit.keras as hk

    world = hk.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.01)), "mse")
    data = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")
    model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=[hk.BroadcastState(), hk.RecordSteps()])
    return _recorded(directory, world.rank)
