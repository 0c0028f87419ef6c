import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import keras

import horovod.keras as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
(x, y), (x_test, y_test) = keras.datasets.mnist.load_data()
x, y, x_test, y_test = x[rank::size], y[rank::size], x_test[rank::size], y_test[rank::size]
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * size))
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=5, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
score = model.evaluate(x_test, y_test, verbose=0)
if rank == 0:
    print("Test accuracy:", score[1])  # finds: metrics-not-averaged
