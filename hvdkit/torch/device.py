"""One GPU, or its share of the cores, for a PyTorch process; the inside of ``hvdkit.torch.pin_device``."""

from __future__ import annotations

import os

import torch

from hvdkit.steps import device
from hvdkit.steps.topology import Topology


def pin(world: Topology, kind: str, threads: int | None) -> torch.device:
    """See ``hvdkit.torch.pin_device``."""
    device.require_wish(kind, threads)
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device.require_gpu(kind, visible, "PyTorch")
    if threads is not None:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(device.cpu_threads_here(world.local_size))
    if visible == 0 or kind == "cpu":
        return torch.device("cpu")
    pinned = torch.device("cuda", device.device_index(world.local_rank, visible))
    torch.cuda.set_device(pinned)
    return pinned
