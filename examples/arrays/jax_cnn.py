"""Train a CNN in JAX with optax on handwritten digits on N processes: the eight steps, numbered."""

import time

import hvdkit.arrays as hk
from hvdkit import datasets, flags


def make_model(height, width, channels, classes, key):
    """Parameters of the CNN of examples/pytorch/cnn.py, without its dropout."""
    import jax

    shapes = {
        "conv1": (3, 3, channels, 32),
        "conv2": (3, 3, 32, 64),
        "dense1": (64 * (height // 2) * (width // 2), 128),
        "dense2": (128, classes),
    }
    initial = jax.nn.initializers.he_normal()
    return {
        name: {"weight": initial(one, shape), "bias": jax.numpy.zeros(shape[-1])}
        for one, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
    }


def logits_of(parameters, x):
    """From images (m, height, width, channels) to logits (m, classes)."""
    import jax

    for name in ("conv1", "conv2"):
        one = parameters[name]
        x = jax.lax.conv_general_dilated(x, one["weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + one["bias"])
    x = jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ parameters["dense1"]["weight"] + parameters["dense1"]["bias"])
    return x @ parameters["dense2"]["weight"] + parameters["dense2"]["bias"]


def main(args):
    world = hk.init()  # 1
    hk.pin_device(world, args.device, args.num_threads)  # 2, before JAX looks for devices
    import jax
    import optax

    seeds = hk.seed_everything(args.seed, world)
    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    key = jax.random.key(int(seeds.shared().generate_state(1)[0]))
    parameters = make_model(*data.x_train.shape[1:], data.classes, key)

    lr = hk.scale_lr(args.lr, world)  # 3
    reduce = hk.distribute(parameters, compression="fp16" if args.fp16_allreduce else "none")  # 4
    steps = hk.steps_per_epoch(len(data.x_train), args.batch_size, world)  # 8
    optimizer = optax.sgd(hk.warmup(lr, world, steps, args.warmup_epochs), momentum=0.9)
    state = hk.broadcast_state({"parameters": parameters, "optimizer": optimizer.init(parameters)})  # 5
    checkpoints = hk.Checkpoints(args.checkpoint_dir, wait=args.wait) if args.checkpoint_dir else None  # 6
    loader = hk.shard((data.x_train, data.y_train), world, args.batch_size, seed=args.seed)  # 7
    test_loader = hk.shard((data.x_test, data.y_test), world, args.batch_size, remainder="exact", shuffle=False)

    @jax.jit
    def gradients_of(parameters, x, y):
        def loss(parameters):
            return optax.softmax_cross_entropy_with_integer_labels(logits_of(parameters, x), y).mean()

        return jax.value_and_grad(loss)(parameters)

    @jax.jit
    def step(state, gradients):
        updates, slots = optimizer.update(gradients, state["optimizer"], state["parameters"])
        return {"parameters": optax.apply_updates(state["parameters"], updates), "optimizer": slots}

    if args.resume:
        state, _ = checkpoints.restore(state, loader=loader)
    first_epoch = loader.epoch

    start = time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        for number, (x, y) in enumerate(hk.record_steps(loader), start=1):
            loss, gradients = gradients_of(state["parameters"], x, y)
            state = step(state, reduce(gradients))
            if number % args.log_interval == 0 and world.is_root:
                print(f"epoch {epoch + 1}/{args.epochs} step {number}/{steps} loss {loss:.4f}")
        if checkpoints:
            checkpoints.save(state, step=(epoch + 1) * steps, loader=loader)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start

    predict = jax.jit(logits_of)
    correct = count = 0
    for x, y, w in test_loader:
        hits = predict(state["parameters"], x).argmax(axis=1) == y
        correct, count = correct + int(hits[w > 0].sum()), count + int((w > 0).sum())
    accuracy = hk.average_metrics({"accuracy": (correct, count)}, world)["accuracy"]
    hk.check_agreement(state, world)

    if world.is_root:
        print(f"All {world.size} ranks hold identical weights and optimizer state.")
        images = (args.epochs - first_epoch) * steps * world.size * args.batch_size
        print(f"Training: {images / seconds:.0f} images/s")
        print(f"Test accuracy: {100 * accuracy:.2f} %")
        print(f"Hvd Procs {world.size} Total time: {seconds} second")


if __name__ == "__main__":
    flags.run(main, __doc__)
