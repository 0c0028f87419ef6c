import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

import horovod.tensorflow.keras as hvd


def main():
    hvd.init()
    (x, y), _ = tf.keras.datasets.mnist.load_data()
    x, y = x[hvd.rank() :: hvd.size()] / 255.0, y[hvd.rank() :: hvd.size()]
    model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * hvd.size())), loss)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    print(f"{len(callbacks)} callbacks")
    model.fit(x, y, epochs=2, steps_per_epoch=len(x) // 64)  # finds: broadcast-missing


main()
