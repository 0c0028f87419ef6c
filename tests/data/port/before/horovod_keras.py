import os

import keras
import numpy as np
import tensorflow as tf
from keras import backend as K
import horovod.keras as hvd

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))

random = np.random.RandomState(0)
x = random.rand(64, 8).astype('float32')[hvd.rank()::hvd.size()]
y = (x.sum(1) > 4).astype('int64')

keras.utils.set_random_seed(1)
model = keras.Sequential()
model.add(keras.layers.Dense(2, activation='softmax', input_shape=(8,)))

opt = keras.optimizers.SGD(lr=0.1 * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(loss='sparse_categorical_crossentropy',
              optimizer=opt,
              metrics=['accuracy'],
              experimental_run_tf_function=False)

callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=1, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint('./checkpoint-{epoch}.h5'))

model.fit(x, y, batch_size=8, shuffle=False, callbacks=callbacks, epochs=2,
          verbose=1 if hvd.rank() == 0 else 0)
