import os

import keras
import numpy as np
import tensorflow as tf

BATCH = int(os.environ.get("BATCH", 8))
random = np.random.RandomState(0)
x = random.rand(97, 8).astype("float32")
y = (x.sum(1) > 4).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.map(lambda x, y: (2.0 * x, y)).batch(BATCH, drop_remainder=True).prefetch(2)

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(float(os.environ.get("LR", 0.05)), momentum=0.9)


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    grads, _ = tf.clip_by_global_norm(grads, 0.5)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


for epoch in range(2):
    for images, labels in dataset:
        loss = step(images, labels)
    print("epoch", epoch, "loss", float(loss))
model.save_weights("net.weights.h5")
