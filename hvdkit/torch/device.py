"""One GPU, or its share of the cores, for a PyTorch process (step 2)."""

from __future__ import annotations

import os

import torch

from hvdkit.steps import device
from hvdkit.steps.topology import Topology


def pin_device(world: Topology, kind: str = "auto", threads: int | None = None) -> torch.device:
    """Give this process one GPU, or its share of the CPU cores (step 2).

    Args:
        world: the job; ``local_rank`` and ``local_size`` are used.
        kind: "auto" (a GPU where PyTorch sees one), "gpu" or "cpu".
        threads: compute threads on the CPU; default: OMP_NUM_THREADS, else the usable cores divided by the ranks here.
    Returns:
        The device, already current (``torch.cuda.set_device``).
    Raises:
        InvalidArgumentError: an unknown kind, threads < 1, or "gpu" where PyTorch sees none.
        LauncherError: more processes on this host than GPUs.
    """
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
