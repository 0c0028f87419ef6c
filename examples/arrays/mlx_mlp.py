"""Train an MLP in MLX on handwritten digits on N processes: the eight steps, numbered."""

import time

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

import hvdkit.arrays as hk
from hvdkit import datasets, flags


class Net(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.layers = [nn.Linear(inputs, 128), nn.Linear(128, 64), nn.Linear(64, classes)]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nn.relu(layer(x))
        return self.layers[-1](x)


def loss_of(model, x, y):
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


def main(args):
    world = hk.init()  # 1
    hk.pin_device(world, "cpu", args.num_threads)  # 2
    mx.set_default_device(mx.cpu)
    seeds = hk.seed_everything(args.seed, world)
    mx.random.seed(int(seeds.shared().generate_state(1)[0]))

    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set = data.x_train.reshape(len(data.x_train), -1), data.y_train
    test_set = data.x_test.reshape(len(data.x_test), -1), data.y_test
    model = Net(train_set[0].shape[1], data.classes)

    lr = hk.scale_lr(args.lr, world)  # 3
    steps = hk.steps_per_epoch(len(train_set[0]), args.batch_size, world)  # 8
    rate = hk.warmup(lr, world, steps, args.warmup_epochs)
    optimizer = optim.SGD(learning_rate=rate(0), momentum=0.9)
    optimizer.init(model.trainable_parameters())
    reduce = hk.distribute(model.trainable_parameters(), compression="fp16" if args.fp16_allreduce else "none")  # 4
    load(model, optimizer, hk.broadcast_state(state_of(model, optimizer)))  # 5
    checkpoints = hk.Checkpoints(args.checkpoint_dir, wait=args.wait) if args.checkpoint_dir else None  # 6
    loader = hk.shard(train_set, world, args.batch_size, seed=args.seed)  # 7
    test_loader = hk.shard(test_set, world, args.batch_size, remainder="exact", shuffle=False)
    gradients_of = nn.value_and_grad(model, loss_of)

    if args.resume:
        state, _ = checkpoints.restore(state_of(model, optimizer), loader=loader)
        load(model, optimizer, state)
    first_epoch = loader.epoch
    taken = loader.position.steps(loader.share)

    start = time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        for number, (x, y) in enumerate(hk.record_steps(loader), start=1):
            loss, gradients = gradients_of(model, mx.array(x), mx.array(y))
            optimizer.learning_rate = rate(taken)
            optimizer.update(model, reduce(gradients))
            mx.eval(model.parameters(), optimizer.state)
            taken += 1
            if number % args.log_interval == 0 and world.is_root:
                print(f"epoch {epoch + 1}/{args.epochs} step {number}/{steps} loss {loss.item():.4f}")
        if checkpoints:
            checkpoints.save(state_of(model, optimizer), step=(epoch + 1) * steps, loader=loader)
    seconds = time.perf_counter() - start

    correct = count = 0
    for x, y, w in test_loader:
        hits = np.asarray(model(mx.array(x)).argmax(axis=1)) == y
        correct, count = correct + int(hits[w > 0].sum()), count + int((w > 0).sum())
    accuracy = hk.average_metrics({"accuracy": (correct, count)}, world)["accuracy"]
    hk.check_agreement(state_of(model, optimizer), world)

    if world.is_root:
        print(f"All {world.size} ranks hold identical weights and optimizer state.")
        images = (args.epochs - first_epoch) * steps * world.size * args.batch_size
        print(f"Training: {images / seconds:.0f} images/s")
        print(f"Test accuracy: {100 * accuracy:.2f} %")
        print(f"Hvd Procs {world.size} Total time: {seconds} second")


def state_of(model, optimizer):
    return {"parameters": model.parameters(), "optimizer": optimizer.state}


def load(model, optimizer, state):
    model.update(state["parameters"])
    optimizer.state = state["optimizer"]


if __name__ == "__main__":
    flags.run(main, __doc__)
