"""Keras' ``fit``, distributed by hvdkit."""

import injecting
import keras
import numpy as np
import tensorflow as tf

import hvdkit.keras as hk

injecting.begin()
world = hk.init()


def read(x):
    injecting.sample(hidden=1.2 * injecting.STEP_S)  # fit prefetches
    return x


def pair(x):
    x = tf.reshape(tf.cast(tf.py_function(read, [x], tf.int64), tf.float32), (1, 1))
    return x, x


def computed(_):
    "After its batch is there."
    injecting.compute()
    return np.float32(0)


class Computes(keras.layers.Layer):
    """A layer that takes its time."""

    def call(self, x):
        return x + tf.ensure_shape(tf.numpy_function(computed, [x], tf.float32), ())


model = keras.Sequential([keras.Input((1,)), Computes(), keras.layers.Dense(injecting.large()), keras.layers.Dense(1)])
model.compile(hk.distribute(keras.optimizers.SGD(1e-9)), "mse")
between = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: injecting.after_step())
callbacks = [hk.BroadcastState(), between]
model.fit(tf.data.Dataset.range(injecting.STEPS).map(pair), epochs=1, verbose=0, callbacks=callbacks)
