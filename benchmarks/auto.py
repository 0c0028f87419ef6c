"""What ``compression="auto"`` costs once it has chosen: a step beside one with ``"none"``, and beside another such.

On one host ``"auto"`` should choose ``"none"``, and then cost nothing. Three copies of a model train in blocks of
steps whose order is drawn anew in each round. Printed are the medians of time(auto) / time(none) and of
time(none again) / time(none) over the rounds with 95 % intervals (bootstrap): the second is what is noise here.

    python benchmarks/auto.py torch|tensorflow|keras|arrays [--width 1500] [--rounds 100]
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time

import numpy as np
from compression import hvdkit_step

from hvdkit.common import intervals

VARIANTS = {"none": "none", "none again": "none", "auto": "auto"}
TRIAL = 40
"""Steps until "auto" has chosen, and some more."""
BLOCK_S = 0.25
BATCH = 32


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("torch", "tensorflow", "keras", "arrays"))
    parser.add_argument("--width", type=int, default=1500, help="the model has 3 width^2 weights (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=100, help="default %(default)s")
    options = parser.parse_args()
    if "HVDKIT_BENCHMARK_AUTO" in os.environ:
        measure(options)
        return
    job = [sys.executable, "-m", "hvdkit", "launch", "-n", "2", "--no-tag", "--env", "HVDKIT_BENCHMARK_AUTO", "--"]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "HVDKIT_BENCHMARK_AUTO": "1"}
    subprocess.run([*job, sys.executable, *sys.argv], check=True, env=environ)


def measure(options):
    hk, world, train_with = {"torch": in_torch, "tensorflow": in_tensorflow, "keras": in_keras, "arrays": in_arrays}[
        options.framework
    ](options.width)
    trains = {name: train_with(kind) for name, kind in VARIANTS.items()}
    for train in trains.values():
        train(TRIAL)
    start = time.perf_counter()
    trains["none"](10)
    steps = max(2, round(BLOCK_S / ((time.perf_counter() - start) / 10)))
    steps = round(hk.average_metrics({"steps": steps}, world)["steps"])
    order, times = random.Random(0), {name: [] for name in trains}  # noqa: S311  the same on all ranks
    for _ in range(options.rounds):
        for name in order.sample(list(trains), len(trains)):
            hk.average_metrics({"begin": 0.0}, world)
            start = time.perf_counter()
            trains[name](steps)
            times[name].append((time.perf_counter() - start) / steps)
    if world.is_root:
        megabytes = 4e-6 * 3 * options.width**2
        rounds = f"{options.rounds} rounds of {steps} steps"
        print(f"{options.framework}, {megabytes:.3g} MB of gradients, 2 ranks, {rounds}")
        for name, own in times.items():
            found = intervals.median((np.array(own) / times["none"]).tolist(), np.random.default_rng(0))
            ratio = f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
            print(f"{name:<12}{1e3 * statistics.median(own):8.2f} ms a step   {ratio} of none", flush=True)


def in_torch(width):
    import torch

    import hvdkit.torch as hk

    world = hk.init()
    hk.pin_device(world, "cpu")

    def train_with(compression):
        step = hvdkit_step(hk, torch, (width, width, 2 * width), compression)

        def train(steps):
            for _ in range(steps):
                step()

        return train

    return hk, world, train_with


def keras_model(width, rank):
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(3)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    return model, np.random.default_rng(rank).normal(size=(BATCH, width)).astype(np.float32)


def in_tensorflow(width):
    import tensorflow as tf

    import hvdkit.tensorflow as hk

    world = hk.init()
    hk.pin_device(world, "cpu")

    def train_with(compression):
        model, given = keras_model(width, world.rank)
        x, variables = tf.constant(given), [variable.value for variable in model.trainable_variables]
        hk.broadcast_state(model)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True)))
            gradients = hk.distribute(tape, compression=compression).gradient(loss, variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(1e-3 * gradient)
            return loss

        def train(steps):
            for _ in range(steps):
                step().numpy()

        return train

    return hk, world, train_with


def in_keras(width):
    import hvdkit.keras as hk

    world = hk.init()
    hk.pin_device(world, "cpu")
    import keras

    def train_with(compression):
        model, x = keras_model(width, world.rank)
        optimizer = hk.distribute(keras.optimizers.SGD(1e-3), compression=compression)
        model.compile(optimizer, loss="mse")

        def train(steps):
            many = np.repeat(x, steps, axis=0)
            model.fit(many, many, batch_size=BATCH, epochs=1, verbose=0, shuffle=False)

        return train

    return hk, world, train_with


def in_arrays(width):
    import hvdkit.arrays as hk

    world = hk.init()
    gradients = [np.ones((width, width), np.float32) for _ in range(3)]

    def train_with(compression):
        average = hk.distribute(gradients, compression=compression)

        def train(steps):
            for _ in range(steps):
                average(gradients)

        return train

    return hk, world, train_with


if __name__ == "__main__":
    main()
