import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

import horovod.tensorflow.keras as hvd

hvd.init()
(x, y), _ = tf.keras.datasets.mnist.load_data()
n, rank, size = len(x) // 64, hvd.rank(), hvd.size()
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).shard(size, rank).repeat()
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * size)), loss=loss)
steps = n // size + (1 if rank < n % size else 0)
model.fit(  # finds: steps-differ
    data,
    epochs=3,
    steps_per_epoch=steps,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
