"""One rank of a section of ``gpu.py``: it runs a program and writes what it found into ``--answers``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from gpu import OVERFLOW_STEP
from torch import nn

import hvdkit
import hvdkit.torch as hk

BATCH = 64
ALLOWED = {"fp32": 1e-6, "compile": 1e-5, "fp16": 1e-3, "autocast-bf16": 1e-3, "bf16": 1e-2}
"""By variant, the relative difference of the weights from those of one process that counts as none."""


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What is here; reduces nothing."""
    cards, why = 0, "none was looked for"
    if args.device == "cuda":
        try:
            torch.cuda.init()
            cards = torch.cuda.device_count()
        except (RuntimeError, AssertionError) as error:
            why = str(error).partition(".")[0]
    return {
        "cards": cards,
        "why": "" if cards else why,
        "names": [torch.cuda.get_device_name(card) for card in range(cards)],
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        "horovod": horovod.__version__,
        "hvdkit": hvdkit.__version__,
        **{name: bool(getattr(hvd, f"{name}_built")()) for name in ("mpi", "gloo", "nccl")},
    }


def begin(args: argparse.Namespace) -> tuple[Any, torch.device]:
    """The job and this rank's device."""
    if args.apart:  # before NCCL looks; so it takes two ranks on one card
        os.environ["NCCL_HOSTID"] = f"rank{os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('HOROVOD_RANK')}"
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    world = hk.init()
    return world, hk.pin_device(world, "cpu" if args.device == "cpu" else "gpu")


def exchange(args: argparse.Namespace) -> dict[str, Any]:
    """All collectives, then a training."""
    world, device = begin(args)
    return {"rank": world.rank, **collectives(world, device), "fp32": train("fp32", world, device, args.steps)}


def collectives(world: Any, device: torch.device) -> dict[str, Any]:
    """Every collective of Horovod on this device, each element compared with what it must be."""
    rank, size = world.rank, world.size
    wrong: list[str] = []
    checked: list[str] = []

    def check(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        checked.append(name)
        if got.device != device or got.dtype != want.dtype or not torch.equal(got, want):
            wrong.append(f"rank {rank}: {name}: {got.flatten()[:4]}, expected {want.flatten()[:4]}")

    def values(length: int, dtype: torch.dtype, of: int = rank) -> torch.Tensor:  # whole numbers, exact in every type
        return (torch.arange(length, device=device) % 13 + of + 1).to(dtype)

    def total(length: int) -> torch.Tensor:
        return torch.stack([values(length, torch.float32, of) for of in range(size)]).sum(0)

    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        for length in (1, 1000, 1 << 20):
            everyone = torch.stack([values(length, dtype, of) for of in range(size)])
            wanted = {"Sum": everyone.sum(0), "Min": everyone.amin(0), "Max": everyone.amax(0)}
            for op, want in {**wanted, "Product": everyone.prod(0)}.items():
                name = f"allreduce {op} {dtype} {length}"
                check(name, hvd.allreduce(values(length, dtype), op=getattr(hvd, op), name=name), want.to(dtype))
    lengths = (3, 100_000, 20_000_000)
    together = hvd.grouped_allreduce([values(one, torch.float32) for one in lengths], op=hvd.Sum, name="grouped")
    for got, length in zip(together, lengths, strict=True):
        check("grouped allreduce", got, total(length))
    row = values(100_000, torch.float32)
    scaled = hvd.allreduce(row, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, name="scaled")
    check("allreduce, scaled", scaled, 2 * total(len(row)))
    check("allreduce Average", hvd.allreduce(row, op=hvd.Average, name="average"), total(len(row)) / size)
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.float32):
        rows = [torch.full((of + 1, 5), of + 1, device=device).to(dtype) for of in range(size)]
        check(f"allgather {dtype}", hvd.allgather(rows[rank], name=f"gather {dtype}"), torch.cat(rows))
        check(f"broadcast {dtype}", hvd.broadcast(rows[rank][:1], size - 1, name=f"broadcast {dtype}"), rows[-1][:1])
    parts = [[torch.full((of + to + 1,), 10.0 * of + to, device=device) for to in range(size)] for of in range(size)]
    splits = torch.tensor([len(part) for part in parts[rank]], dtype=torch.int32)
    got, _ = hvd.alltoall(torch.cat(parts[rank]), splits=splits, name="alltoall")
    check("alltoall", got, torch.cat([part[rank] for part in parts]))
    short = values(size * 3 + 1, torch.float32)  # a row more than can be dealt out evenly: the first rank's
    first = 4 + 3 * (rank - 1) if rank else 0
    part = total(len(short))[first : first + (3 if rank else 4)]
    check("reducescatter", hvd.reducescatter(short, op=hvd.Sum, name="scatter"), part)
    last = hvd.add_process_set([size - 1]) if size > 1 else None
    if last is not None and rank == size - 1:
        check("process set", hvd.allreduce(short, op=hvd.Sum, name="one", process_set=last), short)
    if device.type == "cuda":  # computed just before on a stream of its own: Horovod must wait for it
        with torch.cuda.stream(torch.cuda.Stream()):
            late = torch.ones(4096, 4096, device=device)
            for _ in range(20):
                late = late @ late / 4096
            check("allreduce of another stream", hvd.allreduce(late, op=hvd.Sum, name="stream"), late * size)
    if size > 1:  # a rank that has joined counts as zeros, on the device where the others reduce
        if rank == 0:
            check("allreduce beside joined ranks", hvd.allreduce(short, op=hvd.Sum, name="rest"), short)
        hvd.join(-1 if device.type == "cpu" else device.index)
    return {"checked": len(checked), "wrong": wrong}


def training(args: argparse.Namespace) -> dict[str, Any]:
    """A training of each variant."""
    world, device = begin(args)
    variants = args.variants.split(",")
    return {"rank": world.rank, **{variant: train(variant, world, device, args.steps) for variant in variants}}


def train(variant: str, world: Any, device: torch.device, steps: int) -> dict[str, Any]:
    """Train with the other ranks, then again as one process that has all ranks' batches; compare the weights."""
    model, optimizer = net_and_optimizer(variant, device)
    optimizer = hk.distribute(optimizer, model)
    hk.broadcast_state(model, optimizer)
    loss, seconds = Loss(variant, device, world.size), []
    for step in range(steps):
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss.backward(model, world.rank, step)
        loss.step(optimizer, step)
        wait_for(device)
        seconds.append(time.perf_counter() - begun)
    hk.check_agreement(model, optimizer, world)

    single, optimizer = net_and_optimizer(variant, device)
    single_loss = Loss(variant, device, world.size)
    for step in range(steps):
        gradients = []
        for rank in range(world.size):
            optimizer.zero_grad()
            single_loss.backward(single, rank, step)
            gradients.append([parameter.grad.float() / world.size for parameter in single.parameters()])
        for parameter, of_ranks in zip(single.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = sum(of_ranks[1:], of_ranks[0]).to(parameter.dtype)
        single_loss.step(optimizer, step)

    pairs = list(zip(model.parameters(), single.parameters(), strict=True))
    far = max(((here - there).abs().max() / there.abs().max()).item() for here, there in pairs)
    return {
        "steps": steps,
        "bit_equal": all(torch.equal(here, there) for here, there in pairs),
        "difference": far if far == far else 1e300,  # JSON has no NaN
        "allowed": ALLOWED[variant],
        "skipped": loss.skipped,
        "skipped_alone": single_loss.skipped,
        "scale": loss.scaler.get_scale(),
        "step_ms": typical_ms(seconds),
    }


def net_and_optimizer(variant: str, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """A small CNN, the same on every call."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    model = model.to(device, torch.bfloat16 if variant == "bf16" else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    return torch.compile(model) if variant == "compile" else model, optimizer


class Loss:
    """The loss of one rank's batch in one step, and the optimizer's step with what float16 needs."""

    def __init__(self, variant: str, device: torch.device, size: int) -> None:
        types = {"fp16": torch.float16, "autocast-bf16": torch.bfloat16}
        self.variant, self.device, self.size = variant, device, size
        self.autocast = torch.autocast(device.type, types.get(variant), enabled=variant in types)
        self.scaler = torch.amp.GradScaler(device.type, enabled=variant == "fp16")
        self.skipped: list[int] = []

    def backward(self, model: Any, rank: int, step: int) -> None:
        """Forward and backward of a rank's batch; in step OVERFLOW_STEP the last rank's loss is infinite."""
        seeded = torch.Generator().manual_seed(1000 * step + rank)
        length = BATCH if self.device.type == "cuda" else BATCH // 8  # float16 is slow on CPUs
        x = torch.randn(length, 1, 28, 28, generator=seeded).to(self.device)
        y = torch.randint(10, (length,), generator=seeded).to(self.device)
        with self.autocast:
            loss = nn.functional.cross_entropy(model(x.bfloat16() if self.variant == "bf16" else x), y)
        if self.variant == "fp16" and step == OVERFLOW_STEP and rank == self.size - 1:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Step where the gradients are finite, and note where not."""
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < before:
            self.skipped.append(step)


def wide() -> tuple[Any, torch.Tensor]:
    """A larger model and an input, also for `hvdkit plan memory --model gpu_rank.py:wide`."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 10)]
    return nn.Sequential(*layers), torch.zeros(512, 1024)


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """What the allocator held at most in steps of ``wide``, and how much of that were cuBLAS' workspaces, in bytes."""
    world, device = begin(args)
    model, x = wide()
    model, x = model.to(device), x.to(device)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9), model)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return {"rank": world.rank, "peak": peak, "workspaces": held - torch.cuda.memory_allocated()}


def ddp(args: argparse.Namespace) -> dict[str, Any]:
    """Steps of ``wide`` with DistributedDataParallel, under torchrun."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", rank)
    torch.distributed.init_process_group("gloo" if args.device == "cpu" else "nccl")
    model = nn.parallel.DistributedDataParallel(wide()[0].to(device), gradient_as_bucket_view=True)
    found = timed(model, torch.optim.SGD(model.parameters(), 1e-3), device)
    torch.distributed.destroy_process_group()
    return {"rank": rank, "step_ms": found}


def by_hvdkit(args: argparse.Namespace) -> dict[str, Any]:
    """The same steps with hvdkit."""
    world, device = begin(args)
    model = wide()[0].to(device)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 1e-3), model)
    hk.broadcast_state(model, optimizer)
    return {"rank": world.rank, "step_ms": timed(model, optimizer, device)}


def timed(model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """What a step takes, in milliseconds."""
    x, y = torch.randn(BATCH, 1024, device=device), torch.randint(10, (BATCH,), device=device)
    seconds = []
    for _ in range(20 if device.type == "cpu" else 100):
        begun = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        wait_for(device)
        seconds.append(time.perf_counter() - begun)
    return typical_ms(seconds)


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def typical_ms(seconds: list[float]) -> float:
    """The median of the steps, without the first quarter."""
    return 1e3 * statistics.median(seconds[len(seconds) // 4 :])


PROGRAMS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "machine": machine,
    "exchange": exchange,
    "train": training,
    "memory": memory,
    "ddp": ddp,
    "hvdkit": by_hvdkit,
}


def main() -> None:
    """Run the program, and leave its answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--variants", default="fp32")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--apart", action="store_true", help="take this rank for one on a host of its own, for NCCL")
    args = parser.parse_args()
    answer = PROGRAMS[args.program](args)
    (args.answers / f"rank-{answer.get('rank', 0)}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
