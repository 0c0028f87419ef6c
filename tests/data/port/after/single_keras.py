"""Keras' fit on arrays, on one process."""
import os

import numpy as np
import keras
from keras import layers
import hvdkit.keras as hk

world = hk.init()
hk.pin_device(world)

random = np.random.RandomState(0)
x_train = random.rand(90, 8).astype("float32")
y_train = (x_train.sum(1) > 4).astype("int64")

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(2)])
model.compile(
    optimizer=hk.distribute(keras.optimizers.SGD(hk.scale_lr(float(os.environ.get("LR", 0.01)), world))),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
)
batch_size = int(os.environ.get("BATCH", 8))

"""## Train"""
n_train = int(len(x_train) * (1.0 - 0.1))

model.fit(hk.shard((x_train[:n_train], y_train[:n_train]), world, batch_size, shuffle=False), epochs=2, validation_data=(x_train[n_train:], y_train[n_train:]), verbose=0, callbacks=[hk.BroadcastState()])
if world.is_root:
    model.save("net.keras")  # whole
