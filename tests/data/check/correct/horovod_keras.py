"""fit with Horovod's callbacks, on the Keras that they were made for."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf  # noqa: E402

import horovod.tensorflow.keras as hvd  # noqa: E402


def build_model():
    model = tf.keras.Sequential()
    model.add(tf.keras.layers.Flatten(input_shape=(28, 28)))
    model.add(tf.keras.layers.Dense(10, activation="softmax"))
    return model


def get_callbacks(initial_lr):
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=3, verbose=1),
        tf.keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=3),
    ]
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5"))
        callbacks += [tf.keras.callbacks.TensorBoard("logs")]
    return callbacks


def main(batch_size=128, epochs=12):
    hvd.init()
    gpus = tf.config.experimental.list_physical_devices("GPU")
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    (x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
    x_train, x_test = x_train / 255.0, x_test / 255.0
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shard(hvd.size(), hvd.rank())
    dataset = dataset.shuffle(10000).repeat().batch(batch_size)

    model = build_model()
    scaled_lr = 0.001 * hvd.size()
    optimizer = hvd.DistributedOptimizer(tf.optimizers.Adam(scaled_lr))
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    verbose = 1 if hvd.rank() == 0 else 0
    model.fit(
        dataset,
        steps_per_epoch=len(x_train) // batch_size // hvd.size(),
        epochs=epochs,
        callbacks=get_callbacks(scaled_lr),
        verbose=verbose,
    )
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    if verbose:
        print("Test accuracy:", accuracy)
        model.save("model.h5")


if __name__ == "__main__":
    main()
