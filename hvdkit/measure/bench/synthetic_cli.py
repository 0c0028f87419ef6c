"""``hvdkit bench synthetic``: the framework's program takes the place of this one, which loads no framework."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import launchers
from hvdkit.synthetic import benchmark as steps

PROGRAMS = {name: f"hvdkit.synthetic.{name}" for name in ("torch", "tensorflow", "keras")}
"""What is run for a framework, with ``python -m``."""


@click.command()
@click.option("--framework", type=click.Choice(list(PROGRAMS)), default="torch")
@click.option("--model", type=click.Choice(list(steps.MODELS)), default="cnn")
@click.option("-n", "ranks", type=AT_LEAST_1, metavar="N", help="Start N ranks with `hvdkit launch`.")
@click.option(
    "--batch-size", "--batch_size", type=AT_LEAST_1, default=32, metavar="B", help="Images per step on each rank."
)
@click.option(
    "--num-warmup-batches",
    "warmup_batches",
    type=AT_LEAST_0,
    default=10,
    metavar="K",
    help="Warm-up steps, which are not counted.",
)
@click.option(
    "--num-batches-per-iter",
    "batches_per_iter",
    type=AT_LEAST_1,
    default=10,
    metavar="K",
    help="Steps per measurement.",
)
@click.option("--num-iters", "iters", type=AT_LEAST_1, default=10, metavar="K", help="Number of measurements.")
@click.option("--fp16-allreduce", is_flag=True, help="Send gradients in half precision.")
@click.option(
    "--use-adasum",
    "adasum",
    is_flag=True,
    help="Combine gradients with Adasum, on 1, 2, 4, 8 ... ranks; not with keras.",
)
@click.option("--no-cuda", is_flag=True, help="Train on the CPU.")
@click.option(
    "--image-size",
    type=click.IntRange(min=steps.LEAST_IMAGE_SIZE),
    metavar="PIXELS",
    help=f"For resnet50-shape: height and width  [default: {steps.IMAGE_SIZE}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def synthetic(framework: str, ranks: int | None, no_cuda: bool, **rest: Any) -> int:
    """Train a model on random data, and report images per second.

    Flags and lines are those of Horovod's synthetic benchmarks. Without -n it runs as
    one rank of the job that started it, or alone. Every step is recorded: `hvdkit bench scaling --weak` can measure it.

    \b
      cnn             28 x 28, 1.2 million parameters    deep   60 layers of 256: many small tensors
      mlp             784-256-128-64-10                  wide   20 million parameters in 6 tensors
      resnet50-shape  ResNet-50: 25.6 million parameters in 161 tensors; --image-size 64 makes it cheap

    \b
    Examples:
      hvdkit bench synthetic --framework torch --model mlp -n 2
      hvdkit launch -n 4 --ppn 2 -- hvdkit bench synthetic --model resnet50-shape --image-size 64
      hvdkit bench scaling -n 1,2 --weak -o r.json -- hvdkit bench synthetic --framework tensorflow --num-iters 5

    Exit status: 0; 1 when the framework or Horovod is missing or the job failed; 2 for bad usage.
    """
    if framework == "keras" and rest["adasum"]:
        raise InvalidArgumentError(
            "--use-adasum combines whole updates, which Keras' optimizers do not expose; take --framework torch."
        )
    settings = steps.BenchmarkSettings(cuda=not no_cuda, **rest)
    argv = [sys.executable, "-m", PROGRAMS[framework], settings.word()]
    if ranks is not None:
        settings.require_ranks(ranks)
        argv = _launched(ranks, argv)
    sys.stdout.flush()
    os.execv(argv[0], argv)  # noqa: S606


def _launched(ranks: int, argv: Sequence[str]) -> list[str]:
    inside = launchers.detect(os.environ)
    if inside is not None:
        raise InvalidArgumentError(
            f"-n {ranks} starts a job, and this is a rank of one already (started by {inside.launcher}); leave -n out."
        )
    return [sys.executable, "-m", "hvdkit.cli", "launch", "-n", str(ranks), "--no-tag", "--", *argv]
