"""A loop of TensorFlow with a tape, on Horovod through ``hvdkit.tensorflow``'s ``distribute``."""

import injecting
import tensorflow as tf

import hvdkit.tensorflow as hk

injecting.begin()
world = hk.init()


def read(x):
    injecting.sample(hidden=1.2 * injecting.STEP_S)  # tf.data prefetches
    return x


data = tf.data.Dataset.range(injecting.STEPS).map(lambda x: tf.cast(tf.py_function(read, [x], tf.int64), tf.float32))
variables = [tf.Variable(tf.zeros(64)), tf.Variable(tf.zeros(injecting.large()))]
variables += [tf.Variable(tf.zeros(8)) for _ in range(injecting.small())]


@tf.function
def gradients(x):
    with hk.distribute(tf.GradientTape()) as tape:
        loss = x * tf.add_n([tf.reduce_sum(one) for one in variables])
    return tape.gradient(loss, variables)


for x in data:
    injecting.compute()
    for variable, gradient in zip(variables, gradients(x), strict=True):
        variable.assign_sub(1e-6 * gradient)
    injecting.after_step()
