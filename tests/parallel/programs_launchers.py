"""What each rank of test_any_launcher.py and test_slurm.py does: it meets the others, and writes down what it found."""

import json
from pathlib import Path

import torch

import hvdkit.torch as hk


def sum_of_ranks(directory: str, job: str) -> None:
    """Write ``JOB-RANK.json``: the rank's place, and the sum of all ranks."""
    world = hk.init()
    total = hk.hvd.allreduce(torch.tensor([float(world.rank)]), op=hk.hvd.Sum).item()
    place = [world.size, world.local_rank, world.local_size, world.cross_rank, world.cross_size]
    Path(directory, f"{job}-{world.rank}.json").write_text(json.dumps([*place, world.launcher, total]))
