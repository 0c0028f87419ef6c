"""What the ranks of tests/parallel/test_timeline_recorded.py do: a few steps, recorded by rank 0."""

import os
import signal
import time
from typing import Any

import numpy as np
from lean_imports import lean_imports

FEATURES, BATCH = 6, 4


def record(file: str) -> None:
    """Has to come before init, which starts the recording."""
    os.environ.update(HOROVOD_TIMELINE=file, HOROVOD_TIMELINE_MARK_CYCLES="1")


def torch_steps(file: str, steps: int, killed_after: int | None = None) -> dict[str, Any]:
    record(file)
    with lean_imports():
        import torch

        import hvdkit.torch as hk

    world = hk.init()
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).double()
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
    hk.broadcast_state(model, optimizer)
    start = time.perf_counter()
    for step in range(steps):
        if step == killed_after and world.is_root:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(BATCH, FEATURES, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    # One bucket: its gradients, a number for each, and three that say what this rank needs.
    sizes = [parameter.numel() for parameter in model.parameters()]
    return _ended(start, [8 * (sum(sizes) + len(sizes) + 3)])


def tensorflow_steps(file: str, steps: int) -> dict[str, Any]:
    record(file)
    with lean_imports():
        import tensorflow as tf

        import hvdkit.tensorflow as hk

    hk.init()
    kernel, bias = tf.Variable(tf.ones((FEATURES, 50))), tf.Variable(tf.zeros(50))
    start = time.perf_counter()

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.ones((BATCH, FEATURES)) @ kernel + bias))
        tape = hk.distribute(tape)
        for variable, gradient in zip([kernel, bias], tape.gradient(loss, [kernel, bias]), strict=True):
            variable.assign_sub(0.01 * gradient)

    for _ in range(steps):
        step()
    return _ended(start, [FEATURES * 50 * 4, 50 * 4])


def keras_steps(file: str, steps: int) -> dict[str, Any]:
    record(file)
    with lean_imports():
        import keras

        import hvdkit.keras as hk

    hk.init()
    keras.utils.set_random_seed(1)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(50, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(hk.distribute(keras.optimizers.SGD(0.01)), "mse")
    start = time.perf_counter()
    x, y = np.ones((BATCH * steps, FEATURES), "float32"), np.ones((BATCH * steps, 3), "float32")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return _ended(start, [int(np.prod(weight.shape)) * 4 for weight in model.trainable_weights])


def _ended(start: float, sizes: list[int]) -> dict[str, Any]:
    wall = time.perf_counter() - start
    time.sleep(0.3)  # the writer of the timeline is a thread of its own
    return {"gradients": sorted(sizes), "wall": wall}
