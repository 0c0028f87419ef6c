"""Everything on module level, each rank with every n-th sample."""

import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import keras  # noqa: E402
from keras.layers import Dense  # noqa: E402
from keras.models import Sequential  # noqa: E402

import horovod.keras as hvd  # noqa: E402

hvd.init()
rank, size = hvd.rank(), hvd.size()
os.environ["CUDA_VISIBLE_DEVICES"] = str(hvd.local_rank())

(x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
n = len(x_train) // size
x_train, y_train = x_train[rank::size][:n], y_train[rank::size][:n]
x_train = x_train.reshape(-1, 784) / 255.0
x_test = x_test.reshape(-1, 784) / 255.0

model = Sequential([Dense(64, activation="relu"), Dense(10, activation="softmax")])
opt = keras.optimizers.SGD(learning_rate=0.01 * size)
model.compile(loss="sparse_categorical_crossentropy", optimizer=hvd.DistributedOptimizer(opt), metrics=["accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
checkpoint = keras.callbacks.ModelCheckpoint("best.h5", save_best_only=True)
if rank == 0:
    callbacks.append(checkpoint)
model.fit(x_train, y_train, batch_size=64, epochs=5, callbacks=callbacks, verbose=int(rank == 0))
score = model.evaluate(x_test, y_test, verbose=0)
if rank == 0:
    print("accuracy", score[1])
