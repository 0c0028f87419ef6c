"""Train an MLP in NumPy alone on handwritten digits on N processes; gradients travel while others are computed."""

import itertools
import time

import numpy as np

import hvdkit.arrays as hk
from hvdkit import datasets, flags


def layer(rng, inputs, outputs):
    return {
        "weight": rng.normal(0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32),
        "bias": np.zeros(outputs, np.float32),
    }


def forward(parameters, x):
    """What goes into each layer, (m, inputs), and last the logits, (m, classes)."""
    inputs = [x]
    for number, one in enumerate(parameters):
        x = x @ one["weight"] + one["bias"]
        inputs.append(np.maximum(x, 0) if number < len(parameters) - 1 else x)
        x = inputs[-1]
    return inputs


def cross_entropy(logits, y):
    """The mean loss of a batch, and its gradient by the logits."""
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(probabilities[rows, y]).mean()
    probabilities[rows, y] -= 1
    return loss, probabilities / len(y)


def backward(parameters, inputs, gradient, reducers):
    """Send each layer's gradients on their way as soon as they are there: the last layer's come first."""
    pending = [None] * len(parameters)
    for number in reversed(range(len(parameters))):
        buffers = reducers[number].buffers  # what is written here is sent without a copy
        np.matmul(inputs[number].T, gradient, out=buffers["weight"])
        np.sum(gradient, axis=0, out=buffers["bias"])
        pending[number] = reducers[number].start(buffers)
        if number > 0:
            gradient = (gradient @ parameters[number]["weight"].T) * (inputs[number] > 0)
    return pending


def step(parameters, momenta, pending, rate):
    """SGD with momentum 0.9, in place."""
    for one, momentum, waits in zip(parameters, momenta, pending, strict=True):
        for name, gradient in waits.wait().items():
            momentum[name] *= 0.9
            momentum[name] += gradient
            one[name] -= rate * momentum[name]


def main(args):
    world = hk.init()  # 1
    hk.pin_device(world, "cpu", args.num_threads)  # 2
    seeds = hk.seed_everything(args.seed, world)

    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set = data.x_train.reshape(len(data.x_train), -1), data.y_train
    test_set = data.x_test.reshape(len(data.x_test), -1), data.y_test
    sizes = [train_set[0].shape[1], 128, 64, data.classes]
    rng = np.random.default_rng(seeds.shared())
    parameters = [layer(rng, *pair) for pair in itertools.pairwise(sizes)]
    momenta = [{name: np.zeros_like(values) for name, values in one.items()} for one in parameters]

    lr = hk.scale_lr(args.lr, world)  # 3
    compression = "fp16" if args.fp16_allreduce else "none"
    reducers = [hk.distribute(one, compression=compression) for one in parameters]  # 4
    state = hk.broadcast_state({"parameters": parameters, "momenta": momenta})  # 5
    checkpoints = hk.Checkpoints(args.checkpoint_dir, wait=args.wait) if args.checkpoint_dir else None  # 6
    loader = hk.shard(train_set, world, args.batch_size, seed=args.seed)  # 7
    test_loader = hk.shard(test_set, world, args.batch_size, remainder="exact", shuffle=False)
    steps = hk.steps_per_epoch(len(train_set[0]), args.batch_size, world)  # 8
    rate = hk.warmup(lr, world, steps, args.warmup_epochs)

    if args.resume:
        checkpoints.restore(state, loader=loader)
    first_epoch = loader.epoch
    taken = loader.position.steps(loader.share)

    start = time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        for number, (x, y) in enumerate(hk.record_steps(loader), start=1):
            inputs = forward(parameters, x)
            loss, gradient = cross_entropy(inputs[-1], y)
            pending = backward(parameters, inputs, gradient, reducers)
            step(parameters, momenta, pending, rate(taken))
            taken += 1
            if number % args.log_interval == 0 and world.is_root:
                print(f"epoch {epoch + 1}/{args.epochs} step {number}/{steps} loss {loss:.4f}")
        if checkpoints:
            checkpoints.save(state, step=(epoch + 1) * steps, loader=loader)
    seconds = time.perf_counter() - start

    correct = count = 0
    for x, y, w in test_loader:
        hits = forward(parameters, x)[-1].argmax(axis=1) == y
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
