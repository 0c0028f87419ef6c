"""Data parallelism written from hooks, naive and overlapped, compared and timed beside PyTorch's DDP and Horovod."""

import copy
import math
import statistics
import time

import torch
import torch.distributed as dist
from mlp import CONFIG, MLP, RANDOM_STATE, add_config, batches, gen_dataset, wait_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdkit.torch as hk
from hvdkit import flags
from hvdkit.errors import AgreementError, InvalidArgumentError

TOLERANCE = 1e-5  # between weights: n numbers summed in another order differ in their last bits
LARGEST_BUCKET_MB = 10**6  # DDP counts the bytes in 64 bits
WARMUP = 3  # steps that are not timed


class NaiveDP(nn.Module):
    """Every gradient is averaged as soon as it is there, and the backward pass waits for it."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average_now)

    def forward(self, *inputs):
        return self.model(*inputs)


def average_now(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


class Bucket:
    """Gradients that travel together: views of one buffer, in the order in which the backward pass makes them."""

    def __init__(self, parameters):
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        parts = self.flat.split(sizes)
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]

    def prepare(self):
        """Before a forward pass: have autograd add to the buffer, which is 0 where the optimizer forgot a gradient."""
        self.missing, self.work = len(self.parameters), None
        for position, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                parameter.grad = self.views[position].zero_()
            self.keep(position)

    def keep(self, position):
        """Into the buffer with a gradient that is elsewhere: somebody set it, or forgot it after the forward pass."""
        parameter, view = self.parameters[position], self.views[position]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def send(self):
        self.work = dist.all_reduce(self.flat, async_op=True)

    def receive(self):
        self.work.wait()
        self.flat /= dist.get_world_size()


class MyDP(nn.Module):
    """Gradients travel in buckets while the backward pass still computes others, as in PyTorch's DDP.

    One backward pass for each forward pass; a parameter that takes no part in one has the gradient 0.
    Source: Li et al. 2020, arXiv:2006.15704, section 3.2.

    Args:
        model: gets the weights of rank 0.
        bucket_mb: a bucket is full when it has this many megabytes; one large parameter fills it.
    """

    def __init__(self, model, bucket_mb):
        super().__init__()
        self.model = model
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
        self.buckets = [Bucket(parameters) for parameters in in_buckets(model, bucket_mb * 2**20)]
        for bucket in self.buckets:
            for position, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(
                    lambda _, bucket=bucket, position=position: self._arrived(bucket, position)
                )

    def forward(self, *inputs):
        if torch.is_grad_enabled():
            self.sent, self.waits = 0, False
            for bucket in self.buckets:
                bucket.prepare()
        return self.model(*inputs)

    def _arrived(self, bucket, position):
        """A gradient is there: send the buckets that are complete, in the same order on every rank."""
        if not self.waits:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            self.waits = True
        bucket.keep(position)
        bucket.missing -= 1
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing == 0:
            self._send_next()

    def _send_next(self):
        self.buckets[self.sent].send()
        self.sent += 1

    def _finish(self):
        """The backward pass is over: send buckets of which a parameter took no part, and wait for all."""
        while self.sent < len(self.buckets):
            self._send_next()
        for bucket in self.buckets:
            bucket.receive()


def in_buckets(model, limit):
    """The parameters that need gradients, last ones first, in lists of about ``limit`` bytes of one type and device."""
    lists, size = [], 0
    for parameter in reversed([parameter for parameter in model.parameters() if parameter.requires_grad]):
        kind = (parameter.dtype, parameter.device)
        if not lists or size >= limit or kind != (lists[-1][0].dtype, lists[-1][0].device):
            lists.append([])
            size = 0
        lists[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return lists


def variants(world, args, config, device):
    """The same training four times: name to (what to call, weights, optimizer). Every rank begins with its own."""
    torch.manual_seed(args.seed + world.rank)
    first = MLP(config).to(device)
    models = {name: copy.deepcopy(first) for name in ("naive hooks", "buckets, overlapped", "DDP", "Horovod")}
    rate = hk.scale_lr(config["learning_rate"], world, rule="none")
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=rate) for name, model in models.items()}
    naive, mine, ddp, horovod = models.values()
    called = [
        NaiveDP(naive),
        MyDP(mine, args.bucket_mb),
        DistributedDataParallel(ddp, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True),
        horovod,
    ]
    optimizers["Horovod"] = hk.distribute(optimizers["Horovod"], horovod)
    hk.broadcast_state(horovod, optimizers["Horovod"])
    return {name: (call, model, optimizers[name]) for call, (name, model) in zip(called, models.items(), strict=True)}


def step(model, optimizer, x, y):
    """One step of a training and its seconds, begun by all ranks together."""
    dist.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    wait_for(x.device)
    return time.perf_counter() - start


def largest_difference(one, other):
    """Between two models' weights, on any rank; a collective."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    largest = torch.stack([(a.detach() - b.detach()).abs().max() for a, b in pairs]).max()
    largest = largest.nan_to_num(math.inf)  # a maximum over ranks may lose what is no number
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def require_finite(trained, rate):
    """Refuse to compare weights that are no finite numbers any more; a collective."""
    _, ddp, _ = trained["DDP"]
    if largest_difference(ddp, ddp) > 0:
        raise InvalidArgumentError(
            f"--learning_rate {rate:g} is too large: the training diverged, and not even DDP's weights are finite "
            "numbers; give a smaller one, such as 0.1."
        )


def report(world, trained, seconds):
    """A table of times and differences; raises when the variants did not compute the same."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    differences = {
        name: [largest_difference(model, trained[reference][1]) for reference in ("DDP", "Horovod")]
        for name, (_, model, _) in trained.items()
    }
    if world.is_root:
        print(f"{'':<20} {'ms/step':>9} {'/ DDP':>7} {'/ Horovod':>10}   largest difference from DDP, Horovod")
        for name, median in medians.items():
            ratios = f"{median / medians['DDP']:7.2f} {median / medians['Horovod']:10.2f}"
            print(f"{name:<20} {1000 * median:9.2f} {ratios}   " + " ".join(f"{one:.2g}" for one in differences[name]))
        print("Medians of rank 0, the variants by turns; ranks on one machine share its cores: no times of a cluster.")
    worst = max(differences, key=lambda name: max(differences[name]))
    if max(differences[worst]) > TOLERANCE:
        raise AgreementError(
            f"the weights of '{worst}' differ by {max(differences[worst]):g} from those of DDP or Horovod, more than "
            f"{TOLERANCE:g}; its gradients are not the mean over the ranks."
        )
    if world.is_root:
        print(f"All four hold the same weights, within {TOLERANCE:g}.")


def main(args):
    config = {name: getattr(args, name) for name in CONFIG}
    if config["niters"] <= WARMUP:
        raise InvalidArgumentError(f"--niters is {config['niters']}: the first {WARMUP} steps are not timed.")
    if args.bucket_mb > LARGEST_BUCKET_MB:
        raise InvalidArgumentError(f"--bucket_mb must be at most {LARGEST_BUCKET_MB}, got {args.bucket_mb:g}.")
    world = hk.init()
    hk.init_process_group()
    device = hk.pin_device(world, args.device, args.num_threads)
    train_set, _ = gen_dataset(config, RANDOM_STATE)
    trained = variants(world, args, config, device)
    if world.is_root:
        print(config)
        print(f"{len(trained['buckets, overlapped'][0].buckets)} buckets of about {args.bucket_mb:g} MB", flush=True)

    seconds = {name: [] for name in trained}
    data = batches(train_set, world, config, args.seed)
    for i in range(config["niters"]):
        x, y = (tensor.to(device) for tensor in next(data))
        turn = i % len(trained)  # none is always the first
        for name in [*trained, *trained][turn : turn + len(trained)]:
            call, _, optimizer = trained[name]
            taken = step(call, optimizer, x, y)
            if i >= WARMUP:
                seconds[name].append(taken)
    require_finite(trained, config["learning_rate"])
    report(world, trained, seconds)


def add_flags(add):
    add("--bucket_mb", "--bucket-mb", type=flags.positive, default=0.5, help="megabytes of gradients that go together")
    add_config(add, niters=100)


if __name__ == "__main__":
    flags.run(main, __doc__, only=("device", "num_threads", "seed"), add=add_flags)
