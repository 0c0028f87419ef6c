import os

import keras
import numpy as np
import tensorflow as tf
from keras import backend as K
import hvdkit.keras as hk

# Horovod: initialize Horovod.
world = hk.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
hk.pin_device(world)

random = np.random.RandomState(0)
x = random.rand(64, 8).astype('float32')[world.rank::world.size]
y = (x.sum(1) > 4).astype('int64')

keras.utils.set_random_seed(1)
model = keras.Sequential()
model.add(keras.layers.Dense(2, activation='softmax', input_shape=(8,)))

opt = keras.optimizers.SGD(learning_rate=0.1 * world.size)
opt = hk.distribute(opt)
model.compile(loss='sparse_categorical_crossentropy',
              optimizer=opt,
              metrics=['accuracy'])

callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hk.BroadcastState(),
    hk.AverageMetrics(world),
    hk.Warmup(world, epochs=1),
]
if world.is_root:
    callbacks.append(keras.callbacks.ModelCheckpoint('./checkpoint-{epoch}.keras'))

model.fit(x, y, batch_size=8, shuffle=False, callbacks=callbacks, epochs=2,
          verbose=1 if world.is_root else 0)
