import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
(x, y), _ = tf.keras.datasets.mnist.load_data()
data = tf.data.Dataset.from_tensor_slices((x / 255.0, y)).shard(hvd.size(), hvd.rank()).shuffle(1000).batch(64)
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.compat.v1.train.AdamOptimizer(0.001 * hvd.size())  # finds: removed
optimizer = hvd.DistributedOptimizer(optimizer)


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # finds: distributed-twice
    return loss


for number, (images, labels) in enumerate(data):
    step(images, labels)
    if number == 0:
        hvd.broadcast_variables(model.variables, root_rank=0)
