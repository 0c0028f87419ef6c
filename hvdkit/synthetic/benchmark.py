"""The synthetic benchmark: what ``hvdkit bench synthetic`` trains in every framework, how it is timed, what it prints.

Flags, their defaults and the lines that are printed are those of Horovod's own synthetic benchmarks (Horovod 0.28.1,
``examples/pytorch/pytorch_synthetic_benchmark.py`` and its siblings), so that programs which read them can stay.

What is real: the forward and backward pass, the gradients that are exchanged and the optimizer, through the same eight
steps as any training. What is not: images and labels are one random batch per rank, which is taken again and again, so
that nothing is learnt and no time is spent on input.

The models are those of docs/bench.md. resnet50-shape has the shapes of He et al. 2016 (arXiv:1512.03385, table 1), with
the stride of a block in its 3 x 3 convolution as in most implementations, and each rank's own statistics of batch
normalization.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

import click
import numpy as np
from numpy.typing import NDArray

from hvdkit.common import json_files
from hvdkit.common.json_files import Document
from hvdkit.errors import HvdkitError, InvalidArgumentError
from hvdkit.steps.topology import Topology

RESNET50 = "resnet50-shape"
HIDDEN = {"mlp": (256, 128, 64), "deep": (256,) * 60, "wide": (4096, 4096)}
"""Widths of the dense layers of the models that consist of nothing else."""
MODELS = ("cnn", *HIDDEN, RESNET50)
IMAGE_SIZE, LEAST_IMAGE_SIZE = 224, 64
"""Customary, and the least at which the last stage has more than one pixel to take statistics of."""
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""ResNet-50: inner channels, blocks and stride of the first block of each stage."""
EXPANSION = 4
"""ResNet-50: outer channels of a block per inner channel."""
_SHAPES = {"cnn": (28, 28, 1), "mlp": (784,), "deep": (256,), "wide": (784,)}


@dataclass(frozen=True, slots=True)
class BenchmarkSettings:
    """What is to be run.

    Attributes:
        model: one of ``MODELS``.
        batch_size: samples per rank and step, > 0.
        warmup_batches: steps that do not count, >= 0.
        batches_per_iter: steps that are timed together, > 0.
        iters: how many times, > 0.
        fp16_allreduce: gradients travel in half precision.
        cuda: use a GPU where there is one.
        image_size: height and width for "resnet50-shape", in pixels; None for the others.
        as_json: print one JSON object in place of lines.
    Raises:
        InvalidArgumentError: an unknown model, a number out of range, or an image size that does not go with the model.
    """

    model: str = "cnn"
    batch_size: int = 32
    warmup_batches: int = 10
    batches_per_iter: int = 10
    iters: int = 10
    fp16_allreduce: bool = False
    cuda: bool = True
    image_size: int | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise InvalidArgumentError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}.")
        for name, least in (("batch_size", 1), ("warmup_batches", 0), ("batches_per_iter", 1), ("iters", 1)):
            if getattr(self, name) < least:
                raise InvalidArgumentError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.image_size is not None and self.model != RESNET50:
            raise InvalidArgumentError(
                f"an image size was given, {self.image_size}, and model {self.model!r} has a fixed one; leave it out, "
                f"or take {RESNET50!r}."
            )
        if self.image_size is not None and self.image_size < LEAST_IMAGE_SIZE:
            raise InvalidArgumentError(f"the image size must be at least {LEAST_IMAGE_SIZE}, got {self.image_size}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample: (features,) or (height, width, channels)."""
        size = self.image_size or IMAGE_SIZE
        return (size, size, 3) if self.model == RESNET50 else _SHAPES[self.model]

    @property
    def classes(self) -> int:
        """Outputs of the model."""
        return 1000 if self.model == RESNET50 else 10

    @property
    def batches(self) -> int:
        """Steps in all."""
        return self.warmup_batches + self.iters * self.batches_per_iter

    @property
    def compression(self) -> str:
        """For ``distribute``."""
        return "fp16" if self.fp16_allreduce else "none"

    def data(self, rank: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """One random batch of a rank: x (batch_size, *shape) and y (batch_size,)."""
        random = np.random.default_rng(rank)
        x = random.standard_normal((self.batch_size, *self.shape), dtype=np.float32)
        return x, random.integers(0, self.classes, self.batch_size, dtype=np.int64)

    def word(self) -> str:
        """One word of a command line, which ``python -m hvdkit.synthetic`` reads."""
        return json.dumps(asdict(self))


def bottlenecks() -> list[tuple[int, int, int]]:
    """The blocks of ResNet-50 in order: channels that come in, inner channels, stride.

    The first block of each stage, where stride or channels change, has a projection beside it.
    """
    found, channels = [], 64
    for inner, blocks, first_stride in STAGES:
        for block in range(blocks):
            found.append((channels, inner, first_stride if block == 0 else 1))
            channels = EXPANSION * inner
    return found


def projected(channels: int, inner: int, stride: int) -> bool:
    """Whether a block changes the shape of what it adds to."""
    return stride != 1 or channels != EXPANSION * inner


class Speed(Document, frozen=True):
    """How many images a second; rank 0 speaks for all ranks.

    Attributes:
        found: what was run.
        device: "CPU" or "GPU".
        ranks: how many.
        tensors, parameters: of the model.
        img_per_second: of a rank, the mean of the iterations.
        spread: 1.96 standard deviations of them.
        total_img_per_second: of all ranks.
        iterations: images a second of each.
    """

    kind = "bench-synthetic"
    schema = 2
    written_by = "hvdkit bench synthetic --json"

    found: BenchmarkSettings
    device: str
    ranks: int
    tensors: int
    parameters: int
    img_per_second: float
    spread: float
    total_img_per_second: float
    iterations: tuple[float, ...]


class Stopwatch:
    """Times iterations of several batches each, as they pass; rank 0 prints.

    Args:
        settings: how many batches an iteration has.
        world: the job.
        device: "CPU" or "GPU".
        tensors, parameters: of the model that is trained, their numbers.
    """

    def __init__(
        self, settings: BenchmarkSettings, world: Topology, device: str, tensors: int, parameters: int
    ) -> None:
        self._settings, self._world, self._device = settings, world, device
        self._sizes = (tensors, parameters)
        self._done = 0
        self._begun = 0.0
        self.speeds: list[float] = []
        """Samples per second of this rank, by iteration."""

    def begin(self) -> None:
        """The first batch is about to begin."""
        settings = self._settings
        self._say(f"Model: {settings.model}")
        self._say(f"Batch size: {settings.batch_size}")
        self._say(f"Number of {self._device}s: {self._world.size}")
        self._say("Running warmup...")
        self._begun = time.perf_counter()
        if settings.warmup_batches == 0:
            self._say("Running benchmark...")

    def batch_ended(self, complete: Callable[[], object] = lambda: None) -> None:
        """A batch is done; ``complete`` waits for what a GPU still computes, and is called before a time is taken."""
        self._done += 1
        counted = self._done - self._settings.warmup_batches
        if counted < 0 or counted % self._settings.batches_per_iter:
            return
        complete()
        now = time.perf_counter()
        if counted == 0:
            self._say("Running benchmark...")
        else:
            speed = self._settings.batch_size * self._settings.batches_per_iter / (now - self._begun)
            self._say(f"Iter #{len(self.speeds)}: {speed:.1f} img/sec per {self._device}")
            self.speeds.append(speed)
        self._begun = time.perf_counter()

    def end(self) -> None:
        """All batches are done: print the result. As Horovod's benchmarks do, rank 0 speaks for all ranks."""
        mean, spread = statistics.fmean(self.speeds), 1.96 * statistics.pstdev(self.speeds)
        size, device = self._world.size, self._device
        self._say(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
        self._say(f"Total img/sec on {size} {device}(s): {size * mean:.1f} +-{size * spread:.1f}")
        if self._settings.as_json and self._world.is_root:
            found = Speed(
                self._settings, device, size, *self._sizes, img_per_second=mean, spread=spread,
                total_img_per_second=size * mean, iterations=tuple(self.speeds),
            )  # fmt: skip
            click.echo(json_files.encode(found).rstrip())

    def _say(self, line: str) -> None:
        if self._world.is_root and not self._settings.as_json:
            click.echo(line)


def started_by(command: str, run: Callable[..., object], words: int) -> NoReturn:
    """A main program that a command starts with so many words; it ends with a sentence on a mistake."""
    try:
        if len(sys.argv) != 1 + words:
            raise InvalidArgumentError(f"this program is started by `{command}`; see its --help.")
        run(*sys.argv[1:])
    except HvdkitError as error:
        sys.stderr.write(f"hvdkit: {error}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)
