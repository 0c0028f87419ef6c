"""One rank of a PyTorch variant of ``peers.py``."""

from itertools import pairwise

import torch
from rank import BATCHES, CLASSES, LEARNING_RATE, SHAPES, Clock, parse, place
from torch import nn


def dense(widths, activation=True):
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers if activation else layers[:-1]


def make_model(name):
    torch.manual_seed(0)
    if name == "cnn":
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), *dense([64 * 12 * 12, 128]), nn.Dropout(0.5), nn.Linear(128, CLASSES),
        )  # fmt: skip
    else:
        hidden = {"mlp": [256, 128, 64], "deep": [256] * 60, "wide": [4096, 4096]}[name]
        model = nn.Sequential(*dense([*SHAPES[name][0], *hidden, CLASSES], activation=False))
    for layer in model:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
    return model


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def with_hvdkit(name):
    import hvdkit.torch as hk

    world = hk.init()
    hk.pin_device(world, "cpu")
    model = make_model(name)
    optimizer = hk.distribute(make_optimizer(model), model)
    hk.broadcast_state(model, optimizer)
    return world.rank, world.size, model, optimizer


def with_horovod(name):
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    model = make_model(name)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.rank(), hvd.size(), model, optimizer


def with_ddp(name):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(make_model(name), gradient_as_bucket_view=True)
    return *place(), model, make_optimizer(model)


def alone(name):
    torch.set_num_threads(1)
    model = make_model(name)
    return *place(), model, make_optimizer(model)


VARIANTS = {"hvdkit": with_hvdkit, "horovod": with_horovod, "peer": with_ddp, "alone": alone}


def steps_of(job, rank, model, optimizer):
    """A function that trains so many steps, and calls another after each."""
    x, y = map(torch.from_numpy, job.data(rank))
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    batches = list(zip(x.split(job.batch_size), y.split(job.batch_size), strict=True))
    loss_of = nn.CrossEntropyLoss()

    def train(count, step_done):
        for number in range(count):
            images, labels = batches[number % BATCHES]
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
            step_done()

    return train


def weights_of(model):
    return [parameter.detach().numpy() for parameter in model.parameters()]


def main():
    job = parse(VARIANTS)
    rank, size, model, optimizer = VARIANTS[job.variant](job.model)
    torch.manual_seed(rank)
    clock = Clock(job, rank, size)
    steps_of(job, rank, model, optimizer)(job.warm_up + job.steps, clock.step_done)
    clock.write(weights_of(model))
    if job.variant == "peer":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
