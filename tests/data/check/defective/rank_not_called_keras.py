import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf
from horovod.tensorflow.keras import DistributedOptimizer, callbacks, init, local_rank, rank, size

init()
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[local_rank], "GPU")  # finds: rank-not-called
(x, y), _ = tf.keras.datasets.mnist.load_data()
x, y = x[rank() :: size()], y[rank() :: size()]
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
optimizer = DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * size()))
model.compile(optimizer=optimizer, loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
hooks = [callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback()]
if rank == 0:  # finds: rank-not-called
    hooks.append(tf.keras.callbacks.ModelCheckpoint("model-{epoch}.h5"))
model.fit(
    x,
    y,
    steps_per_epoch=60000 // 64 // size,  # finds: rank-not-called
    epochs=3,
    callbacks=hooks,
    verbose=0,
)
