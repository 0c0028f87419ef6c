"""Train nn.Transformer on random sequences on N processes, with Horovod or PyTorch's own DDP, from memory or HDF5."""

import contextlib
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdkit.torch as hk
from hvdkit import flags
from hvdkit.core.communicator import on_root
from hvdkit.datasets import HDF5Dataset, write_hdf5
from hvdkit.errors import InvalidArgumentError
from hvdkit.flags import not_negative, whole

NAMES = ("source", "target")


def add_flags(add):
    add("--backend", choices=("horovod", "ddp"), default="horovod", help="what averages the gradients")
    add("--data", choices=("memory", "h5"), default="memory", help="where the samples are")
    add("--data_file", "--data-file", default="transformer.h5", metavar="FILE", help="written once if it is missing")
    add("--samples", type=whole(1), default=2048, help="in the data set")
    add("--source_length", "--source-length", type=whole(1), default=1, help="positions of a source sequence")
    add("--target_length", "--target-length", type=whole(1), default=20, help="positions of a target sequence")
    add("--width", type=whole(1), default=512, help="features at each position (d_model)")
    add("--heads", type=whole(1), default=8, help="attention heads, which share the width")
    add("--encoder_layers", "--encoder-layers", type=whole(1), default=6, help="layers of the encoder")
    add("--decoder_layers", "--decoder-layers", type=whole(1), default=6, help="layers of the decoder")
    add("--feedforward", type=whole(1), default=2048, help="features inside a layer")
    add("--dropout", type=not_negative, default=0.1, help="share of values that are dropped, below 1")
    add("--dtype", choices=("float32", "float64", "float16", "bfloat16"), default="float32", help="weights and data")
    add("--scaling", choices=("linear", "sqrt", "none"), default="linear", help="of the rate with the processes")
    add("--workers", type=whole(0), default=0, help="processes that load data for each process")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model; the default, "
        "inductor, needs a C++ compiler")  # fmt: skip
    add("--profile", metavar="DIR", help="write traces there, for hvdkit trace summary DIR")
    add("--profile_steps", "--profile-steps", type=whole(1), default=2, help="steps to record, after the first two")


def check(args):
    if args.width % args.heads:
        raise InvalidArgumentError(f"--width {args.width} cannot be shared by --heads {args.heads}; give a multiple.")
    if args.dropout >= 1:
        raise InvalidArgumentError(f"--dropout must be below 1, got {args.dropout:g}.")
    if args.compile and args.compile not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise InvalidArgumentError(
            f"--compile {args.compile} is no backend of torch.compile; give {known}, eager or aot_eager."
        )


def random_data(args):
    """Source (samples, source_length, width) and target (samples, target_length, width), uniform in [0, 1)."""
    generator = torch.Generator().manual_seed(args.seed)
    # NumPy and HDF5 have no bfloat16: such samples are float32 until they are on the device.
    dtype = torch.float32 if args.dtype == "bfloat16" else getattr(torch, args.dtype)
    lengths = (args.source_length, args.target_length)
    return [torch.rand((args.samples, length, args.width), generator=generator).to(dtype) for length in lengths]


def file_of(args, world):
    """The HDF5 file: the root writes it, the others wait; one that is there already must hold the same."""
    wanted = {name: getattr(args, name) for name in ("samples", "source_length", "target_length", "width", "seed")}
    wanted["dtype"] = args.dtype

    def write():
        path = Path(args.data_file)
        if not path.exists():
            data = dict(zip(NAMES, [part.numpy() for part in random_data(args)], strict=True))
            write_hdf5(path, data, attributes={"transformer": str(sorted(wanted.items()))})
        elif (found := HDF5Dataset(path, NAMES).attributes.get("transformer")) != str(sorted(wanted.items())):
            raise InvalidArgumentError(f"{args.data_file} holds other data ({found}); give another --data_file.")

    on_root(world.is_root, write, lambda value: broadcast(args.backend, value))
    return HDF5Dataset(args.data_file, NAMES)


def broadcast(backend, value):
    """Rank 0's object on every rank."""
    if backend == "horovod":
        import horovod.torch as hvd

        # Horovod's own name is the type's, and ranks that name a tensor differently wait for each other forever.
        return hvd.broadcast_object(value, root_rank=0, name="transformer.file")
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def main(args):
    check(args)
    world = hk.init() if args.backend == "horovod" else hk.init_process_group()
    device = hk.pin_device(world, args.device, args.num_threads)
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)

    data = file_of(args, world) if args.data == "h5" else torch.utils.data.TensorDataset(*random_data(args))
    loader = hk.shard(data, world, args.batch_size, seed=args.seed, num_workers=args.workers)
    model = nn.Transformer(
        args.width, args.heads, args.encoder_layers, args.decoder_layers, args.feedforward, args.dropout,
        batch_first=True, device=device, dtype=dtype,
    )  # fmt: skip
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=hk.scale_lr(args.lr, world, args.scaling))
    if args.backend == "horovod":
        optimizer = hk.distribute(optimizer, model)
        hk.broadcast_state(model, optimizer)
    else:
        model = DistributedDataParallel(model)
    if args.compile:
        model = torch.compile(model, backend=args.compile)
    # After broadcasting, and with a stream of its own on each rank: dropout must differ between them.
    torch.manual_seed(args.seed + 1 + world.rank)

    model.train()
    steps = hk.steps_per_epoch(args.samples, args.batch_size, world)
    profiled = hk.profile(args.profile, 1, 1, args.profile_steps) if args.profile else contextlib.nullcontext()
    start = time.perf_counter()
    with profiled as profiler:
        for epoch in range(args.epochs):
            total = 0.0
            for source, target in loader:
                source, target = source.to(device, dtype), target.to(device, dtype)
                optimizer.zero_grad()
                loss = loss_of(model(source, target), target)
                loss.backward()
                optimizer.step()
                total += loss.item()
                if profiler:
                    profiler.step()
            mean = average(args.backend, total / steps, device, world)
            if world.is_root:
                print(f"epoch {epoch + 1}/{args.epochs} loss {mean:.6f}", flush=True)
            if not math.isfinite(mean):
                raise InvalidArgumentError(f"the loss is {mean}; give a smaller --lr, or a --dtype with more range.")
    seconds = time.perf_counter() - start

    if world.is_root:
        print(f"Training: {args.epochs * steps * world.size * args.batch_size / seconds:.0f} samples/s")
        print(f"Hvd Procs {world.size} Total time: {seconds} second")
    if args.backend == "ddp":
        del model  # before the group: the last owner of its threads must not be DDP, which waits for them with the GIL
        dist.destroy_process_group()


def average(backend, value, device, world):
    """The mean over the ranks."""
    if backend == "horovod":
        return hk.average_metrics({"loss": value}, world)["loss"]
    total = torch.tensor(value, device=device)
    dist.all_reduce(total)
    return total.item() / world.size


if __name__ == "__main__":
    flags.run(
        main,
        __doc__,
        only=("epochs", "batch_size", "lr", "device", "num_threads", "seed"),
        defaults={"epochs": 10, "lr": 0.001, "seed": 0},
        add=add_flags,
    )
