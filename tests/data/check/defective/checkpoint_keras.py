import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
from tensorflow import keras
from tensorflow.keras.callbacks import ModelCheckpoint

import horovod.tensorflow.keras as hvd


def build():
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(learning_rate=0.001 * hvd.size())
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=loss)
    return model


hvd.init()
(x, y), _ = keras.datasets.mnist.load_data()
x, y = x[hvd.rank() :: hvd.size()] / 255.0, y[hvd.rank() :: hvd.size()]
model = build()
model.fit(
    x,
    y,
    batch_size=64,
    epochs=3,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        ModelCheckpoint("checkpoint-{epoch}.h5"),  # finds: checkpoint-on-every-rank
    ],
    verbose=1 if hvd.rank() == 0 else 0,
)
model.save_weights("final.h5")  # finds: checkpoint-on-every-rank
model.save(f"rank-{hvd.rank()}.h5")
