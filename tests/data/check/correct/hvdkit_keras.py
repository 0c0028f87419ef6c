"""hvdkit's callbacks in Keras 3's fit."""

import keras

import hvdkit.keras as hk

world = hk.init()
hk.pin_device(world)
(x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
train_set = hk.shard((x_train / 255.0, y_train), world, batch_size=64)
steps = hk.steps_per_epoch(len(x_train), 64, world)

model = keras.Sequential([keras.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")])
optimizer = keras.optimizers.Adam(hk.scale_lr(1e-3, world))
hk.distribute(optimizer)
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [
    hk.BroadcastState(),
    keras.callbacks.EarlyStopping("loss", patience=2),
    keras.callbacks.ModelCheckpoint("best.keras", "loss", save_best_only=True),
    keras.callbacks.BackupAndRestore("backup"),
    hk.warmup(optimizer, world, steps),
    hk.Checkpoint("runs/mnist"),
]
model.fit(train_set, epochs=5, callbacks=callbacks, verbose=2 if world.is_root else 0)
loss, accuracy = model.evaluate(x_test / 255.0, y_test, verbose=0)
if world.is_root:
    print(f"accuracy {accuracy:.4f}")
