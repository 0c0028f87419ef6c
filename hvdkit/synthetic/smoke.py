"""``hvdkit test``: one rank of it, started by that command: an allreduce, ten training steps, then equal weights."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from hvdkit.errors import HvdkitError, TopologyMismatchError
from hvdkit.synthetic.benchmark import BenchmarkSettings, started_by

STEPS = 10


def run(framework: str, ranks: int, *, gpu: bool) -> None:
    """Do what ``hvdkit test`` checks in a framework, and print a line ``hvdkit test: CHECK: WHAT`` after each part.

    Args:
        framework: "torch", "tensorflow" or "keras".
        ranks: how many were started.
        gpu: use GPUs where the framework sees some.
    Raises:
        MissingFrameworkError: the framework, or Horovod for it, is missing.
        TopologyMismatchError: Horovod does not connect the ranks that were started.
        HvdkitError: a sum over the ranks is wrong, or their weights differ after the training.
    """
    hk: Any = importlib.import_module(f"hvdkit.{framework}")
    world = hk.init()
    if world.size != ranks:
        raise TopologyMismatchError(
            f"{ranks} ranks were started, and Horovod sees {world.size}: each would train alone; run `hvdkit doctor`."
        )
    numbers = range(1, ranks + 1)
    total = hk.average_metrics({"number": world.rank + 1}, world)["number"] * ranks
    words = " + ".join(map(str, numbers))
    for horovod in (sys.modules.get("horovod.torch"), sys.modules.get("horovod.tensorflow")):
        if horovod is not None and horovod.is_initialized():
            click.echo(f"hvdkit test: controller: {'MPI' if horovod.mpi_enabled() else 'Gloo'}")
    if total != sum(numbers):
        raise HvdkitError(f"Horovod adds up {words} to {total:g} on rank {world.rank}; run `hvdkit install --force`.")
    click.echo(f"hvdkit test: allreduce: {words} = {total:g} on every rank, under {world.launcher}")
    training: Any = importlib.import_module(f"hvdkit.synthetic.{framework}")
    settings = BenchmarkSettings("mlp", batch_size=8, warmup_batches=0, batches_per_iter=STEPS, iters=1, cuda=gpu)
    model, optimizer = training.run(settings)
    hk.check_agreement(model, optimizer, world)
    click.echo(f"hvdkit test: training: after {STEPS} steps all ranks have the same weights, bit for bit")


if __name__ == "__main__":
    started_by("hvdkit test", lambda framework, ranks, device: run(framework, int(ranks), gpu=device == "gpu"), 3)
