"""What check_agreement costs: its time over the time of a training step, measured in turn in one run.

    mpirun -n 2 python benchmarks/check_agreement.py            (also horovodrun, srun, hvdkit launch)
    ... --framework tensorflow --width 1024 --rounds 20 --json cost.json

A round is STEPS training steps and then one check, so that both see the same machine. The ratio is that of the medians;
run every 100 steps, a check adds a hundredth of it to the training. Ranks that share cores measure contention.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

STEPS = 5


def torch_training(width):
    import torch

    import hvdkit.torch as hk

    world = hk.init()
    device = hk.pin_device(world)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    ).to(device)  # fmt: skip
    optimizer = hk.distribute(torch.optim.Adam(model.parameters()), model)
    hk.broadcast_state(model, optimizer)
    x, y = torch.randn(64, 64, device=device), torch.zeros(64, dtype=torch.long, device=device)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return world, step, lambda: hk.check_agreement(model, optimizer, world)


def tensorflow_training(width):
    import keras
    import tensorflow as tf

    import hvdkit.tensorflow as hk

    world = hk.init()
    hk.pin_device(world)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(width, "relu"), layers.Dense(width, "relu"), layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam()
    hk.broadcast_state(model, optimizer)
    x, y = tf.random.normal((64, 64)), tf.zeros(64, tf.int32)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step():
        with hk.distribute(tf.GradientTape()) as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return world, lambda: train_step().numpy(), lambda: hk.check_agreement(model, optimizer, world)


def keras_training(width):
    import keras
    import numpy as np

    import hvdkit.keras as hk

    world = hk.init()
    hk.pin_device(world)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(width, "relu"), layers.Dense(width, "relu"), layers.Dense(10)]
    )
    model.compile(hk.distribute(keras.optimizers.Adam()), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    hk.broadcast_state(model, model.optimizer)
    x, y = np.random.normal(size=(64, 64)).astype("float32"), np.zeros(64, "int32")
    return world, lambda: model.train_on_batch(x, y), lambda: hk.check_agreement(model, model.optimizer, world)


TRAININGS = {"torch": torch_training, "tensorflow": tensorflow_training, "keras": keras_training}


def seconds(action, times=1):
    start = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - start) / times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=TRAININGS, default="torch")
    parser.add_argument("--width", type=int, default=1024, help="units of the two hidden layers (default 1024)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that are measured (default 20)")
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    world, step, check = TRAININGS[args.framework](args.width)
    for warm_up in (step, step, check, step, check):
        warm_up()
    rounds = [(seconds(step, STEPS), seconds(check)) for _ in range(args.rounds)]
    step_time, check_time = (statistics.median(times) for times in zip(*rounds, strict=True))
    result = {
        "framework": args.framework,
        "ranks": world.size,
        "cores": os.cpu_count(),
        "width": args.width,
        "step_ms": 1e3 * step_time,
        "check_ms": 1e3 * check_time,
        "percent_of_training_every_100_steps": check_time / step_time,
    }
    if world.is_root:
        print(f"{args.framework}, {world.size} ranks on {os.cpu_count()} cores, width {args.width}")
        print(f"step {1e3 * step_time:.1f} ms, check {1e3 * check_time:.1f} ms, ratio {check_time / step_time:.2f}")
        print(f"every 100 steps the check takes {check_time / step_time:.2f} % of the training time")
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
