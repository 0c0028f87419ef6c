"""Train a multi-layer perceptron on artificial data: one process, or N with Horovod or PyTorch's DDP (--backend)."""

import itertools
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdkit.torch as hk
from hvdkit import flags
from hvdkit.errors import AgreementError

CONFIG = {
    "n_layers": (4, "linear layers"),
    "dim_in": (1024, "numbers in a sample"),
    "n_classes": (32, "classes"),
    "dim_hidden": (256, "width of the layers between"),
    "train_size": (10000, "training samples"),
    "batch_size": (64, "samples per step on each process"),
    "learning_rate": (0.1, "of plain SGD, for any number of processes"),
    "niters": (1000, "steps"),
}
RANDOM_STATE = 0  # of the data: the same on every rank, so that no rank has to send them
SEPARATION = 0.3  # of the centres, in units of the noise: learning takes a few hundred steps
PASSED_ON = ("device", "num_threads", "seed", "log_interval")


class MLP(nn.Sequential):
    """(n, dim_in) -> (n, n_classes), with ReLU between the linear layers."""

    def __init__(self, config):
        widths = [config["dim_in"], *[config["dim_hidden"]] * (config["n_layers"] - 1), config["n_classes"]]
        *hidden, last = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        super().__init__(*(layer for linear in hidden for layer in (linear, nn.ReLU())), last)


def gen_dataset(config, rand_state):
    """Points around one centre for each class: training set and test set, a fifth as large, alike on every rank."""
    rng = np.random.default_rng(rand_state)
    centres = SEPARATION * rng.standard_normal((config["n_classes"], config["dim_in"]), dtype=np.float32)

    def points(n):
        labels = rng.integers(config["n_classes"], size=n)
        noise = rng.standard_normal((n, config["dim_in"]), dtype=np.float32)
        return torch.utils.data.TensorDataset(torch.from_numpy(centres[labels] + noise), torch.from_numpy(labels))

    return points(config["train_size"]), points(-(-config["train_size"] // 5))


def batches(dataset, world, config, seed):
    """Of iteration i, rank r of n takes batch i * n + r of the epoch's order; each epoch has an order of its own."""
    loader = hk.shard(dataset, world, config["batch_size"], seed=seed)
    while True:
        yield from loader


class Horovod:
    """Gradients are averaged by Horovod, while the backward pass goes on."""

    def __init__(self):
        self.world = hk.init()

    def distribute(self, model, optimizer):
        optimizer = hk.distribute(optimizer, model)
        hk.broadcast_state(model, optimizer)
        return model, optimizer

    def mean(self, value):
        return hk.average_metrics({"value": value.item()}, self.world)["value"]

    def check(self, model, optimizer):
        hk.check_agreement(model, optimizer, self.world)


class DDP:
    """Gradients are averaged by PyTorch's DistributedDataParallel."""

    def __init__(self):
        self.world = hk.init_process_group()

    def distribute(self, model, optimizer):
        return DistributedDataParallel(model), optimizer

    def mean(self, value):
        total = value.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.world.size

    def check(self, model, _):
        check_parameter_closeness(model)


def bits(tensor):
    """Its bytes: of these, two that are no numbers (NaN) can be equal."""
    return tensor.reshape(-1).view(torch.uint8)


def check_parameter_closeness(model):
    """Compare every rank's parameters with those of rank 0, bit for bit; a collective of the process group.

    Raises:
        AgreementError: on every rank, also where the parameters are rank 0's.
    """
    names, same = [], []
    for name, parameter in model.named_parameters():
        root = parameter.detach().clone()
        dist.broadcast(root, src=0)
        names.append(name)
        same.append(torch.equal(bits(root), bits(parameter.detach())))
    everywhere = torch.tensor(same, dtype=torch.int32, device=root.device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    if differing := [name for name, equal in zip(names, everywhere.tolist(), strict=True) if not equal]:
        raise AgreementError(
            f"the ranks hold different values of {differing[0]}, and of {len(differing)} of {len(names)} parameters in "
            "all; give every rank rank 0's weights before the first step and the mean gradient in each."
        )


def wait_for(device):
    """Until the device has done what it was given: a GPU still computes when Python has gone on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def test_loss(model, dataset, device):
    """Mean loss over the whole test set, here on one rank: what this rank computes is what each would."""
    x, y = (tensor.to(device) for tensor in dataset.tensors)
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), y).item()


def train(config, args):
    backend = {"horovod": Horovod, "ddp": DDP}[args.backend]()
    world = backend.world
    device = hk.pin_device(world, args.device, args.num_threads)
    if world.is_root:
        print(config, flush=True)
    train_set, test_set = gen_dataset(config, RANDOM_STATE)
    torch.manual_seed(args.seed)
    local = MLP(config).to(device)
    rate = hk.scale_lr(config["learning_rate"], world, rule="none")
    model, optimizer = backend.distribute(local, torch.optim.SGD(local.parameters(), lr=rate))

    data = batches(train_set, world, config, args.seed)
    for step in range(config["niters"]):
        start = time.perf_counter()
        x, y = next(data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        wait_for(device)
        seconds = time.perf_counter() - start
        if args.check:
            backend.check(local, optimizer)
        if step % args.log_interval == 0:
            train_loss = backend.mean(loss)
            if world.is_root:
                losses = f"train_loss {train_loss:.4f} | test_loss {test_loss(local, test_set, device):.4f}"
                print(f"step {step} | {losses} | step time {1000 * seconds:.2f}ms", flush=True)
    if args.check and world.is_root:
        print(f"All {world.size} ranks held identical weights after each of {config['niters']} steps.")


def main(args):
    train({name: getattr(args, name) for name in CONFIG}, args)


def add_flags(add):
    add("--backend", choices=("horovod", "ddp"), default="horovod", help="what averages the gradients")
    add("--check", action="store_true", help="after each step, check that all ranks hold the same weights")
    add_config(add)


def add_config(add, **other):
    """A flag for each entry of the configuration; ``other`` are defaults that differ."""
    for name, (value, meaning) in CONFIG.items():
        kind = flags.positive if isinstance(value, float) else flags.whole(1)
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        add(*spellings, type=kind, default=other.get(name, value), help=meaning)


if __name__ == "__main__":
    flags.run(main, __doc__, only=PASSED_ON, defaults={"log_interval": 100}, add=add_flags)
