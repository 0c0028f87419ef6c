import keras

import hvdkit.keras as hk

world = hk.init()
hk.pin_device(world)
(x, y), _ = keras.datasets.mnist.load_data()
train_set = hk.shard((x / 255.0, y), world, batch_size=64)
steps = hk.steps_per_epoch(len(x), 64, world)
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(learning_rate=1e-3)  # finds: learning-rate-unscaled
hk.distribute(optimizer)
model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(train_set, epochs=5, callbacks=[hk.BroadcastState(), hk.warmup(optimizer, world, steps)])
