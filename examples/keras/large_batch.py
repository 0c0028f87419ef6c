"""Large batches and learning rate warmup: 8 workers' learning rate, at once and after 3 epochs of warmup.

Every step uses the batch of 8 workers, 8 * 32 = 256 images, and their learning rate, Adam at 8 * 0.005 = 0.04, on
however many processes (1, 2, 4 or 8) it is started. On the bundled digits that is 5 steps in an epoch. The first steps
at the full rate kill the ReLUs of one of the two wide layers: the accuracy stays near 10 %, the loss at 2.30. Warmed
up, the same training converges. Chosen by trying 4 seeds each: one wide layer recovers in some trainings without
warmup, and at twice the rate some stay near chance even with it.
"""

import sys
from pathlib import Path

import keras

import hvdkit.keras as hk
from hvdkit import datasets, flags
from hvdkit.errors import InvalidArgumentError, MissingFrameworkError

WORKERS = hk.Topology(rank=0, size=8)
PLOT = Path("large_batch.png")


def make_model(shape, classes):
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(32, kernel_size=3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, kernel_size=3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(classes),
        ]
    )


def train(args, world, data, warmup_epochs):
    """History of one training: accuracy, loss and learning rate at the end of each epoch."""
    keras.utils.set_random_seed(args.seed)
    model = make_model(data.x_train.shape[1:], data.classes)
    optimizer = hk.distribute(keras.optimizers.Adam(hk.scale_lr(args.lr, WORKERS)))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss_of, metrics=["accuracy"])
    share = args.batch_size * WORKERS.size // world.size
    train_data = hk.shard((data.x_train, data.y_train), world, share, seed=args.seed)
    callbacks = [hk.BroadcastState(), hk.Warmup(WORKERS, epochs=warmup_epochs), hk.AverageMetrics(world)]
    return model.fit(train_data, epochs=args.epochs, verbose=0, callbacks=callbacks).history


def print_curves(curves):
    print("epoch" + "".join(f" | {name:^27}" for name in curves))
    print("     " + " |    loss  accuracy   rate   " * len(curves))
    columns = [zip(each["loss"], each["accuracy"], each["learning_rate"], strict=True) for each in curves.values()]
    for epoch, rows in enumerate(zip(*columns, strict=True), start=1):
        print(f"{epoch:5}" + "".join(f" | {loss:9.4f}  {accuracy:.4f}  {rate:.4f}   " for loss, accuracy, rate in rows))


def save_plot(curves):
    try:
        import matplotlib
    except ImportError:
        raise MissingFrameworkError(
            f"{PLOT} needs Matplotlib, which is not installed; run `pip install matplotlib`."
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, history in curves.items():
        axes.plot(range(1, len(history["accuracy"]) + 1), history["accuracy"], marker="o", label=name)
    axes.set(
        xlabel="epoch", ylabel="training accuracy", ylim=(0, 1.03), title="Global batch and learning rate of 8 workers"
    )
    axes.legend(loc="center right")
    figure.savefig(PLOT, dpi=150)
    print(f"The curves are in {PLOT}.")


def main(args):
    world = hk.init()
    hk.pin_device(world, args.device, args.num_threads)
    if WORKERS.size % world.size:
        raise InvalidArgumentError(f"8 workers' batch needs 1, 2, 4 or 8 processes, got {world.size}.")
    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    curves = {
        "no warmup": train(args, world, data, 0),
        f"{args.warmup_epochs:g} epochs of warmup": train(args, world, data, args.warmup_epochs),
    }
    if world.is_root:
        print_curves(curves)
        save_plot(curves)


if __name__ == "__main__":
    sys.argv[1:1] = ["--lr", "0.005", "--epochs", "12"]  # what this example needs; the user's own flags count later
    flags.run(main, __doc__.splitlines()[0])
