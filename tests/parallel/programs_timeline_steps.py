"""What the ranks of tests/parallel/test_timeline_steps.py do; each function returns JSON values."""

import os
from typing import Any

from lean_imports import lean_imports

FEATURES, HIDDEN, CLASSES = 16, 32, 4


def torch_training() -> tuple[Any, Any]:
    """The adapter, and a function that takes one step."""
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    with lean_imports():
        import torch

        import hvdkit.torch as hk

    hk.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES))
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x, y = torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return hk, step


def torch_steps(path: str, first: int, stop: int, total: int, second: str) -> dict[str, Any]:
    """Some steps to one file, and, after it, all steps of another block to a second one."""
    hk, step = torch_training()
    during = []
    with hk.record_timeline(path, steps=range(first, stop)) as recording:
        for _ in range(total):
            during.append(recording.recording)
            step()
            recording.step()
    with hk.record_timeline(second) as recording:
        for _ in range(3):
            step()
            recording.step()
    step()
    return {"during": during}


def torch_profiled(timeline: str, trace: str, steps: int) -> dict[str, Any]:
    """A timeline and a profiler trace of the same steps; each step is a range of the trace."""
    hk, step = torch_training()
    with lean_imports():
        import horovod.torch as hvd
        import torch

    step()
    with hk.record_timeline(timeline), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for number in range(steps):
            with torch.profiler.record_function(f"step {number}"):
                step()
    if hvd.rank() == 0:
        seen.export_chrome_trace(trace)
    return {}


def keras_and_tensorflow_steps(keras_path: str, tensorflow_path: str) -> dict[str, Any]:
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    with lean_imports():
        import horovod.tensorflow as hvd
        import keras
        import numpy as np
        import tensorflow as tf

        import hvdkit.keras as hk
        import hvdkit.tensorflow as hk_tensorflow

    world = hk.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    hk.broadcast_state(model, model.optimizer)
    data = hk.shard((np.ones((64, FEATURES)), np.ones((64, CLASSES))), world, 4)
    model.fit(data, epochs=2, verbose=0, callbacks=[hk.RecordTimeline(keras_path, range(6, 10))])
    with hk_tensorflow.record_timeline(tensorflow_path, steps=range(2, 5)) as recording:
        for number in range(7):
            hvd.allreduce(tf.ones(10), name=f"step{number}")
            recording.step()
    return {}
