import os

import keras
import numpy as np
import tensorflow as tf
import hvdkit.tensorflow as hk

world = hk.init()
hk.pin_device(world)

BATCH = int(os.environ.get("BATCH", 8))
random = np.random.RandomState(0)
x = random.rand(97, 8).astype("float32")
y = (x.sum(1) > 4).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(world.size, drop_remainder=True).unbatch().shard(world.size, world.rank)
dataset = dataset.map(lambda x, y: (2.0 * x, y)).batch(BATCH, drop_remainder=True).prefetch(2)

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(hk.scale_lr(float(os.environ.get("LR", 0.05)), world), momentum=0.9)
hk.broadcast_state(model, optimizer)


@tf.function
def step(images, labels):
    with hk.distribute(tf.GradientTape()) as tape:
        loss = loss_of(labels, model(images, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    grads, _ = tf.clip_by_global_norm(grads, 0.5)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


for epoch in range(2):
    for images, labels in dataset:
        loss = step(images, labels)
    if world.is_root:
        print("epoch", epoch, "loss", float(loss))
if world.is_root:
    model.save_weights("net.weights.h5")
