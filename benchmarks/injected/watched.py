"""A training that ``hk.Monitor`` watches, SECONDS long where nothing is injected.

    watched.py CAUSE STRENGTH FRAMEWORK SECONDS DIRECTORY

What ``benchmarks/monitor.py --injected`` starts.
"""

import sys

import injecting
import numpy as np

FRAMEWORK, SECONDS, DIRECTORY = sys.argv[3], float(sys.argv[4]), sys.argv[5]
STEPS = int(SECONDS / injecting.STEP_S)
FEATURES = 16


def samples(hidden=0.0):
    for _ in range(STEPS):
        injecting.sample(hidden)
        yield np.ones((4, FEATURES), "float32")


def torch_loop():
    import torch

    import hvdkit.torch as hk

    world = hk.init()
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 1e-6), model)
    hk.broadcast_state(model, optimizer)
    with hk.Monitor(DIRECTORY, world) as monitor:
        for x in monitor(samples()):
            optimizer.zero_grad()
            loss = model(torch.from_numpy(x)).square().mean()
            injecting.compute()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)


def tensorflow_loop():
    import keras
    import tensorflow as tf

    import hvdkit.tensorflow as hk

    world = hk.init()
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    optimizer = hk.distribute(keras.optimizers.SGD(1e-6))
    hk.broadcast_state(model, optimizer)

    @tf.function
    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    with hk.Monitor(DIRECTORY, world) as monitor:
        for x in monitor(samples()):
            injecting.compute()
            monitor.log(loss=train(tf.constant(x)))


def keras_fit():
    import keras
    import tensorflow as tf

    import hvdkit.keras as hk

    world = hk.init()

    class Computes(keras.layers.Layer):
        def call(self, x):
            with tf.control_dependencies([tf.py_function(injecting.compute, [], [])]):
                return tf.identity(x)

    model = keras.Sequential([keras.Input((FEATURES,)), Computes(), keras.layers.Dense(1)])
    model.compile(hk.distribute(keras.optimizers.SGD(1e-6)), "mse")
    pairs = ((x, x[:, :1]) for x in samples(hidden=injecting.STEP_S))  # fit reads ahead
    callbacks = [hk.BroadcastState(), hk.Monitor(DIRECTORY, world)]
    model.fit(pairs, steps_per_epoch=STEPS, verbose=0, callbacks=callbacks)


injecting.begin()
{"torch": torch_loop, "tensorflow": tensorflow_loop, "keras": keras_fit}[FRAMEWORK]()
