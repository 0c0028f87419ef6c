import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import keras

import horovod.keras as hvd

hvd.init()
(x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
x_train, x_test = x_train / 255.0, x_test / 255.0
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(x_train, y_train, batch_size=64, epochs=5, callbacks=callbacks)  # finds: dataset-not-sharded
