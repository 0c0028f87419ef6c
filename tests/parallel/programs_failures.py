"""A small training in which rank 1 fails after a few steps, for the failure matrix.

``programs_failures.py torch|keras raise|kill|exit|leave|_exit|segfault|hang|before|absent``: "before" hangs in front of
init, "absent" ends there, and rank 1 prints when it fails.
"""

import ctypes
import os
import signal
import sys
import time

import numpy as np
from lean_imports import lean_imports

STEPS_BEFORE = 5


def fail(how: str) -> None:
    print(f"failing at {time.time()}", flush=True)
    if how == "raise":
        raise ValueError("the batch of rank 1 is bad")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(3)
    if how in ("leave", "absent"):
        sys.exit(0)
    if how == "_exit":
        os._exit(4)
    if how == "segfault":
        ctypes.string_at(0)
    if how in ("hang", "before"):
        wait_for_a_lock()


def wait_for_a_lock() -> None:
    while True:
        time.sleep(60)


def train_with_torch(how: str) -> None:
    with lean_imports():
        import torch

        import hvdkit.torch as hk

    if how in ("before", "absent") and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK")) == "1":
        fail(how)
    world = hk.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
    hk.broadcast_state(model, optimizer)
    for step in range(2 * STEPS_BEFORE):
        if step == STEPS_BEFORE and world.rank == 1:
            fail(how)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.ones(8, 4)), torch.ones(8, 1)).backward()
        optimizer.step()


def train_with_keras(how: str) -> None:
    with lean_imports():
        import keras

        import hvdkit.keras as hk

    world = hk.init()

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == STEPS_BEFORE and world.rank == 1:
                fail(how)

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = hk.distribute(keras.optimizers.SGD(0.01))
    hk.broadcast_state(model, optimizer)
    model.compile(optimizer, loss="mse", jit_compile=False)
    x, y = np.ones((80, 4), "float32"), np.ones((80, 1), "float32")
    model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=[Fail()])


if __name__ == "__main__":
    {"torch": train_with_torch, "keras": train_with_keras}[sys.argv[1]](sys.argv[2])
