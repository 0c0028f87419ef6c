import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

import horovod.tensorflow.keras as hvd

BATCH = 128


def dataset(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10000).repeat().batch(BATCH)


def main():
    hvd.init()
    (x, y), _ = tf.keras.datasets.mnist.load_data()
    model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    lr = 0.001 * hvd.size()
    model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.Adam(lr)), loss=loss)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    steps = len(x) // BATCH
    model.fit(dataset(x, y), epochs=3, steps_per_epoch=steps, callbacks=callbacks)  # finds: steps-not-divided


main()
