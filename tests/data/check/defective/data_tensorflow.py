import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
tf.random.set_seed(1)
(x, y), _ = tf.keras.datasets.mnist.load_data()
data = tf.data.Dataset.from_tensor_slices((x / 255.0, y))  # finds: dataset-not-sharded
data = data.shuffle(10000).batch(64)
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.SGD(0.01 * hvd.size())
steps = len(x) // 64 // hvd.size()


def train_step(images, labels, first):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    if first:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)


for epoch in range(3):
    for step, (images, labels) in enumerate(data.take(steps)):
        train_step(images, labels, epoch + step == 0)
