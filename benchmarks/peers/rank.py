"""What every rank of ``peers.py`` has in common, whatever its framework: arguments, data, the clock, its file."""

import argparse
import json
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHAPES = {
    "cnn": ((28, 28, 1), 64),
    "mlp": ((784,), 64),
    "deep": ((256,), 32),
    "wide": ((784,), 64),
    "many-400": ((16,), 32),
    "many-2000": ((16,), 32),
    "shuffled": ((256,), 32),
    "bf16": ((784,), 64),
}
"""The shape of one sample and the batch size of each model."""
CLASSES = 10
BATCHES = 16
"""Batches in memory, which are taken in turn."""
LEARNING_RATE = 0.001
MEETING_SECONDS = 120


@dataclass(frozen=True)
class Job:
    """One run of one variant, as ``peers.py`` asked for it."""

    variant: str
    model: str
    steps: int
    warm_up: int
    directory: Path

    def data(self, rank):
        """Images (samples, height, width, channels) or vectors (samples, features), and labels: each rank its own."""
        shape, batch_size = SHAPES[self.model]
        random = np.random.default_rng(rank)
        x = random.standard_normal((BATCHES * batch_size, *shape), dtype=np.float32)
        return x, random.integers(0, CLASSES, len(x), dtype=np.int64)

    @property
    def batch_size(self):
        return SHAPES[self.model][1]


def parse(variants):
    """The command line of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=variants)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("steps", type=int)
    parser.add_argument("warm_up", type=int)
    parser.add_argument("directory", type=Path)
    return Job(**vars(parser.parse_args()))


def place():
    """Rank and size of a process that ``peers.py`` started itself."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Clock:
    """Times steps; where nothing else keeps the ranks together, they meet once, after the warm-up steps."""

    def __init__(self, job, rank, size):
        self.job, self.rank, self.size = job, rank, size
        self.ends = []
        self._done = 0

    def step_done(self):
        self._done += 1
        if self._done == self.job.warm_up and self.job.variant == "alone":
            self._meet()
        if self._done >= self.job.warm_up:
            self.ends.append(time.perf_counter())

    def _meet(self):
        (self.job.directory / f"warm-{self.rank}").touch()
        deadline = time.monotonic() + MEETING_SECONDS
        while len(list(self.job.directory.glob("warm-*"))) < self.size:
            if time.monotonic() > deadline:
                raise TimeoutError("the other processes did not finish their warm-up steps")
            time.sleep(0.001)

    def write(self, weights):
        """Leave the step times (seconds) and a digest of the weights, a list of arrays, where ``peers.py`` reads them.

        A file and not a line of output: launchers cut long lines, and mix those of two ranks.
        """
        digest = 0
        for array in weights:
            digest = zlib.crc32(np.ascontiguousarray(array).tobytes(), digest)
        seconds = np.diff(self.ends).tolist()
        found = {"rank": self.rank, "size": self.size, "step_seconds": seconds, "weights_digest": digest}
        (self.job.directory / f"rank-{self.rank}.json").write_text(json.dumps(found))
