"""Train a CNN on handwritten digits with Keras on N processes with Horovod: single.py and the eight steps, numbered."""

import time

import keras

import hvdkit.keras as hk
from hvdkit import datasets, flags


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
    world = hk.init()  # 1
    hk.pin_device(world, args.device, args.num_threads)  # 2
    hk.seed_everything(args.seed, world)

    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set, test_set = (data.x_train, data.y_train), (data.x_test, data.y_test)
    model = make_model(data.x_train.shape[1:], data.classes)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    optimizer = keras.optimizers.SGD(hk.scale_lr(args.lr, world), momentum=0.9)  # 3
    optimizer = hk.distribute(optimizer, compression="fp16" if args.fp16_allreduce else "none")  # 4
    model.compile(optimizer, loss_of, metrics=["accuracy"])
    train_data = hk.shard(train_set, world, args.batch_size, seed=args.seed)  # 7
    steps = hk.steps_per_epoch(len(data.x_train), args.batch_size, world)  # 8
    callbacks = [
        hk.BroadcastState(),  # 5
        hk.Warmup(world, steps, args.warmup_epochs),
        hk.AverageMetrics(world),
        hk.CheckAgreement(world),
    ]
    if args.checkpoint_dir:
        callbacks.append(hk.Checkpoint(args.checkpoint_dir, resume=args.resume, wait=args.wait))  # 6

    start = time.perf_counter()
    with hk.Monitor(None, world, args.log_interval, ["progress"]) as monitor:
        history = model.fit(train_data, epochs=args.epochs, verbose=2, callbacks=[*callbacks, monitor])
    seconds = time.perf_counter() - start

    accuracy = hk.evaluate(model, test_set, world, args.batch_size)["accuracy"]
    hk.check_agreement(model, optimizer, world)

    if world.is_root:
        print(f"All {world.size} ranks hold identical weights and optimizer state.")
        print(f"Training: {world.size * len(history.epoch) * steps * args.batch_size / seconds:.0f} images/s")
        print(f"Test accuracy: {100 * accuracy:.2f} %")
        print(f"Hvd Procs {world.size} Total time: {seconds} second")


if __name__ == "__main__":
    flags.run(main, __doc__)
