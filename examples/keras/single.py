"""Train a CNN on handwritten digits with Keras in one process: cnn.py without the eight steps."""

import os
import time

import keras

from hvdkit import datasets, flags


class Progress(keras.callbacks.Callback):
    """Prints the loss so far in the epoch, every few steps."""

    def __init__(self, interval):
        super().__init__()
        self.interval = interval

    def on_epoch_begin(self, epoch, *_):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % self.interval == 0:
            done, of = f"epoch {self.epoch + 1}/{self.params['epochs']}", f"step {batch + 1}/{self.params['steps']}"
            print(f"{done} {of} loss {logs['loss']:.4f}")


def make_model(shape, classes):
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(32, kernel_size=3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, kernel_size=3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(classes),
        ]
    )


def pin_device(kind, threads):
    if threads and keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
    elif threads and keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(threads)
    elif threads:
        os.environ["PJRT_NPROC"] = str(threads)  # read by JAX's compiler, XLA
    if kind != "auto":
        keras.device(f"{kind}:0").__enter__()


def main(args):
    pin_device(args.device, args.num_threads)
    keras.utils.set_random_seed(args.seed)

    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set, test_set = (data.x_train, data.y_train), (data.x_test, data.y_test)
    model = make_model(data.x_train.shape[1:], data.classes)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
    model.compile(optimizer, loss_of, metrics=["accuracy"])
    steps = len(data.x_train) // args.batch_size
    callbacks = [Progress(args.log_interval)]

    start = time.perf_counter()
    x, y = (part[: steps * args.batch_size] for part in train_set)
    model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, verbose=2, callbacks=callbacks)
    seconds = time.perf_counter() - start

    _, accuracy = model.evaluate(*test_set, verbose=0)

    print(f"Training: {args.epochs * steps * args.batch_size / seconds:.0f} images/s")
    print(f"Test accuracy: {100 * accuracy:.2f} %")
    print(f"Total time: {seconds} second")


if __name__ == "__main__":
    flags.run(main, __doc__)
