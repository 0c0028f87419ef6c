"""Train a CNN on handwritten digits on N processes with Horovod: single.py and the eight steps, numbered."""

import time

import keras
import tensorflow as tf

import hvdkit.tensorflow as hk
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
    hk.broadcast_state(model, optimizer)  # 5
    checkpoints = hk.Checkpoints(args.checkpoint_dir, wait=args.wait) if args.checkpoint_dir else None  # 6
    dataset = hk.shard(train_set, world, args.batch_size, seed=args.seed)  # 7
    test_dataset = hk.shard(test_set, world, args.batch_size, remainder="exact", shuffle=False)
    steps = hk.steps_per_epoch(len(data.x_train), args.batch_size, world)  # 8
    schedule = hk.warmup(optimizer, world, steps, args.warmup_epochs)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hk.distribute(tape, compression="fp16" if args.fp16_allreduce else "none")  # 4
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    if args.resume:
        checkpoints.restore(model, optimizer, loader=dataset, schedule=schedule)
    first_epoch = dataset.epoch
    monitor = hk.Monitor(None, world, args.log_interval, ["progress"], epochs=args.epochs)

    start = time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        for x, y in monitor(dataset):
            loss = train_step(x, y)
            schedule.step()
            monitor.log(loss=loss)
        if checkpoints:
            checkpoints.save(model, optimizer, step=(epoch + 1) * steps, loader=dataset)
    monitor.close()
    seconds = time.perf_counter() - start

    correct = count = 0
    for x, y, w in test_dataset:
        hits = tf.argmax(model(x), axis=1) == y
        correct, count = correct + hits[w > 0].numpy().sum(), count + (w > 0).numpy().sum()
    accuracy = hk.average_metrics({"accuracy": (correct, count)}, world)["accuracy"]
    hk.check_agreement(model, optimizer, world)

    if world.is_root:
        print(f"All {world.size} ranks hold identical weights and optimizer state.")
        images = (args.epochs - first_epoch) * steps * world.size * args.batch_size
        print(f"Training: {images / seconds:.0f} images/s")
        print(f"Test accuracy: {100 * accuracy:.2f} %")
        print(f"Hvd Procs {world.size} Total time: {seconds} second")


if __name__ == "__main__":
    flags.run(main, __doc__)
