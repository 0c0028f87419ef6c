"""One GPU, or its share of the cores, for a PyTorch process; the inside of ``hvdkit.torch.pin_device``."""

from __future__ import annotations

import os

import torch

from hvdkit.errors import InvalidArgumentError
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


def mixed_precision(precision: str, device: torch.device) -> tuple[torch.autocast, torch.amp.GradScaler]:
    """What a step computes in, and what keeps float16's small gradients from becoming zeros; neither does for "fp32".

    Raises:
        InvalidArgumentError: another precision than "fp32", "bf16" or "fp16".
    """
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in types:
        raise InvalidArgumentError(f"precision must be one of {', '.join(types)}, got {precision!r}.")
    autocast = torch.autocast(device.type, types[precision], enabled=precision != "fp32")
    return autocast, torch.amp.GradScaler(device.type, enabled=precision == "fp16")
