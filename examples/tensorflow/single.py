"""Train a CNN on handwritten digits in one process: cnn.py without the eight steps."""

import time

import keras
import tensorflow as tf

from hvdkit import datasets, flags
from hvdkit.errors import InvalidArgumentError


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


def main(args):
    if args.device == "gpu" and not tf.config.list_physical_devices("GPU"):
        raise InvalidArgumentError("a GPU was asked for, but TensorFlow sees none; use --device cpu.")
    if args.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    if args.num_threads:
        tf.config.threading.set_intra_op_parallelism_threads(args.num_threads)
    keras.utils.set_random_seed(args.seed)

    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set, test_set = (data.x_train, data.y_train), (data.x_test, data.y_test)
    model = make_model(data.x_train.shape[1:], data.classes)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
    dataset = tf.data.Dataset.from_tensor_slices(train_set)
    dataset = dataset.shuffle(len(data.x_train), seed=args.seed).batch(args.batch_size, drop_remainder=True)
    test_dataset = tf.data.Dataset.from_tensor_slices(test_set).batch(args.batch_size)
    steps = len(dataset)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    start = time.perf_counter()
    for epoch in range(args.epochs):
        for step, (x, y) in enumerate(dataset, start=1):
            loss = train_step(x, y)
            if step % args.log_interval == 0:
                print(f"epoch {epoch + 1}/{args.epochs} step {step}/{steps} loss {float(loss):.4f}")
    seconds = time.perf_counter() - start

    correct = 0
    for x, y in test_dataset:
        correct += (tf.argmax(model(x), axis=1) == y).numpy().sum()

    print(f"Training: {args.epochs * steps * args.batch_size / seconds:.0f} images/s")
    print(f"Test accuracy: {100 * correct / len(data.x_test):.2f} %")
    print(f"Total time: {seconds} second")


if __name__ == "__main__":
    flags.run(main, __doc__)
