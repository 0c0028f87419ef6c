"""One rank of a PyTorch variant of ``peers.py``."""

import random
from itertools import pairwise

import torch
from rank import BATCHES, CLASSES, LEARNING_RATE, SHAPES, Clock, parse, place
from torch import nn


def dense(widths, activation=True):
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers if activation else layers[:-1]


class Shuffled(nn.Module):
    """Layers that are registered in another order than the one in which they compute."""

    def __init__(self, layers):
        super().__init__()
        self.order = [f"layer{number}" for number in range(len(layers))]
        named = list(zip(self.order, layers, strict=True))
        for name, layer in random.Random(0).sample(named, len(named)):  # noqa: S311  the same on all ranks
            self.add_module(name, layer)

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


HIDDEN = {
    "mlp": [256, 128, 64],
    "deep": [256] * 60,
    "wide": [4096, 4096],
    "many-400": [16] * 199,
    "many-2000": [16] * 999,
    "shuffled": [256] * 60,
    "bf16": [4096, 4096],
}


def make_model(name):
    torch.manual_seed(0)
    if name == "cnn":
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), *dense([64 * 12 * 12, 128]), nn.Dropout(0.5), nn.Linear(128, CLASSES),
        )  # fmt: skip
    else:
        model = nn.Sequential(*dense([*SHAPES[name][0], *HIDDEN[name], CLASSES], activation=False))
    for layer in model:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
    if name == "shuffled":
        return Shuffled(list(model))
    return model.bfloat16() if name == "bf16" else model


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
    x = x.to(next(model.parameters()).dtype)
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
    return [parameter.detach().float().numpy() for parameter in model.parameters()]


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
