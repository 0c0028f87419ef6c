"""Keras' fit on arrays, on one process."""
import os

import numpy as np
import keras
from keras import layers

random = np.random.RandomState(0)
x_train = random.rand(90, 8).astype("float32")
y_train = (x_train.sum(1) > 4).astype("int64")

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(2)])
model.compile(
    optimizer=keras.optimizers.SGD(float(os.environ.get("LR", 0.01))),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
)
batch_size = int(os.environ.get("BATCH", 8))

"""## Train"""

model.fit(x_train, y_train, batch_size=batch_size, epochs=2, validation_split=0.1, shuffle=False, verbose=0)
model.save("net.keras")  # whole
