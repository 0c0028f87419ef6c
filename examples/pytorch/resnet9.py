"""Train a ResNet9 on CIFAR-10 on N processes with Horovod; time, accuracy and loss of each rank, and of all."""

import time

import numpy as np
import torch
from torch import nn

import hvdkit.torch as hk
from hvdkit import datasets, flags
from hvdkit.errors import InvalidArgumentError

SIDE, CHANNELS = 32, 3  # of CIFAR's images


def conv(inputs, outputs, kernel=3, stride=1):
    """Convolution, BatchNorm, ReLU: (n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
    # A bias before BatchNorm has the gradient 0 but for rounding, and Adam makes steps of full size from that.
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


def resnet9(classes):
    """(n, 3, 32, 32) -> (n, classes): eight convolutions, four of them in two residual blocks, and a classifier."""
    return nn.Sequential(
        conv(CHANNELS, 16, kernel=7, stride=4),  # 8 x 8
        conv(16, 32, stride=2),  # 4 x 4
        Residual(conv(32, 32), conv(32, 32)),
        conv(32, 64, stride=2),  # 2 x 2
        conv(64, 128, stride=2),  # 1 x 1
        Residual(conv(128, 128), conv(128, 128)),
        nn.Flatten(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def like_cifar(images):
    """(n, h, w, 1 or 3) with h and w up to 32 -> (n, 32, 32, 3): whole-number enlargement, a black margin, colours."""
    height, width, channels = images.shape[1:]
    factor = SIDE // max(height, width)
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    margins = [SIDE - factor * extent for extent in (height, width)]
    images = np.pad(images, [(0, 0), *((margin // 2, margin - margin // 2) for margin in margins), (0, 0)])
    return images.repeat(CHANNELS // channels, axis=3)


def tensors(x, y):
    """Images (n, height, width, channels) as PyTorch wants them, (n, channels, height, width), and their labels."""
    x = torch.from_numpy(like_cifar(x)).permute(0, 3, 1, 2).contiguous()
    return torch.utils.data.TensorDataset(x, torch.from_numpy(y))


def load(args):
    shape = (SIDE, SIDE, CHANNELS) if args.data == "synthetic" else None
    where = {"directory": args.data_dir, "download": args.download}
    return datasets.load(args.data, **where, seed=args.seed, n=args.samples, shape=shape)


def show(name, totals, world):
    """Print what this rank's sums say, and on rank 0 what those of all ranks together do; a collective."""
    correct, loss, count = totals
    mean = hk.average_metrics({"correct": (correct, count), "loss": (loss, count)}, world)
    if count:  # more ranks than samples leave one without
        print(f"{name}  correct: {correct / count:.4f}  loss: {loss / count:.4f}", flush=True)
    if world.is_root:
        print(f"{name}  all {world.size} ranks  correct: {mean['correct']:.4f}  loss: {mean['loss']:.4f}", flush=True)


def sums(output, loss, y, counted=None):
    """Of a batch: right answers, summed loss, samples; without those that are not counted (fillers)."""
    hits = output.detach().argmax(dim=1) == y
    counted = torch.ones_like(hits) if counted is None else counted
    return np.array([hits[counted].sum().item(), loss.detach()[counted].sum().item(), counted.sum().item()])


def evaluate(model, loader, loss_of, device):
    """Sums over this rank's part of the test data."""
    model.eval()
    totals = np.zeros(3)
    with torch.no_grad():
        for x, y, w in loader:
            x, y = x.to(device), y.to(device)
            output = model(x)
            totals += sums(output, loss_of(output, y), y, counted=w.to(device) > 0)
    return totals


def main(args):
    if args.samples is not None and args.data != "synthetic":
        raise InvalidArgumentError(
            f"--samples {args.samples} is for --data synthetic; {args.data} has its own number, leave it out."
        )
    if args.batch_size < 2:
        raise InvalidArgumentError("--batch_size is 1: BatchNorm needs at least 2 samples per step on each process.")
    world = hk.init()  # 1
    device = hk.pin_device(world, args.device, args.num_threads)  # 2
    hk.seed_everything(args.seed, world)
    print(f"Use {device}", flush=True)

    data = load(args)
    train_set, test_set = tensors(data.x_train, data.y_train), tensors(data.x_test, data.y_test)
    model = resnet9(data.classes).to(device)
    if args.sync_batch_norm:
        hk.sync_batch_norm(model)
    loss_of = nn.CrossEntropyLoss(reduction="none")

    lr = hk.scale_lr(args.lr, world)  # 3
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=args.weight_decay)
    optimizer = hk.distribute(optimizer, model, compression="fp16" if args.fp16_allreduce else "none")  # 4
    hk.broadcast_state(model, optimizer)  # 5
    checkpoints = hk.Checkpoints(args.checkpoint_dir, wait=args.wait) if args.checkpoint_dir else None  # 6
    loader = hk.shard(train_set, world, args.batch_size, seed=args.seed)  # 7
    test_loader = hk.shard(test_set, world, args.batch_size, remainder="exact", shuffle=False)
    steps = hk.steps_per_epoch(len(train_set), args.batch_size, world)  # 8
    schedule = hk.warmup(optimizer, world, steps, args.warmup_epochs)
    print(f"partitioned dataset length: {steps * args.batch_size}", flush=True)

    if args.resume:
        checkpoints.restore(model, optimizer, loader=loader, schedule=schedule)
    first_epoch = loader.epoch

    start = time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        model.train()
        totals = np.zeros(3)
        for step, (x, y) in enumerate(loader, start=1):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            output = model(x)
            loss = loss_of(output, y)
            loss.mean().backward()
            optimizer.step()
            schedule.step()
            totals += sums(output, loss, y)
            if step % args.log_interval == 0 and world.is_root:
                print(f"epoch {epoch + 1}/{args.epochs} step {step}/{steps} loss {loss.mean().item():.4f}")
        show(epoch, totals, world)
        if not args.sync_batch_norm:
            hk.average_statistics(model)  # each rank's BatchNorm has seen its own part of the data alone
        if checkpoints:
            checkpoints.save(model, optimizer, step=(epoch + 1) * steps, loader=loader)
    seconds = time.perf_counter() - start
    print(f"Time: {seconds}", flush=True)

    show("test", evaluate(model, test_loader, loss_of, device), world)
    mean_seconds = hk.average_metrics({"seconds": seconds}, world)["seconds"]
    hk.check_agreement(model, optimizer, world, statistics=True)

    if world.is_root:
        print(f"All {world.size} ranks hold identical weights and optimizer state.")
        print(f"Hvd Procs {world.size} Total time: {mean_seconds} second")


def add_flags(add):
    add("--weight_decay", "--weight-decay", type=flags.not_negative, default=0.001, help="of Adam (L2)")
    add("--samples", type=flags.whole(1), help="training samples of the data set synthetic (default: 1000)")
    add(
        "--sync_batch_norm",
        "--sync-batch-norm",
        action="store_true",
        help="BatchNorm over the global batch: n processes then train as one with the n-fold batch",
    )


if __name__ == "__main__":
    defaults = {"data": "cifar10", "lr": 0.001, "batch_size": 128, "epochs": 1, "warmup_epochs": 0}
    flags.run(main, __doc__, defaults=defaults, add=add_flags)
