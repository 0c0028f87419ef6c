"""One GPU, or its share of the cores, for a PyTorch process (step 2)."""

from __future__ import annotations

import os
from typing import Any

import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import device
from hvdkit.steps.checkpoint import Saved
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


class Precision:
    """What a step computes in, and what keeps float16's small gradients from becoming zeros; "fp32" is neither.

    Args:
        name: "fp32", "bf16" or "fp16".
        device: where the model is.
    Raises:
        InvalidArgumentError: another name.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        if name not in types:
            raise InvalidArgumentError(f"precision must be one of {', '.join(types)}, got {name!r}.")
        self.autocast = torch.autocast(device.type, types[name], enabled=name != "fp32")
        self._scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def step(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
        """Forget the last gradients, go backward, and step where all are finite; returns the loss."""
        optimizer.zero_grad()
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(optimizer)
        self._scaler.update()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """For ``Checkpoints.save(..., extra=)``."""
        return {"scaler": self._scaler.state_dict()}

    def go_on(self, saved: Saved | None) -> None:
        """Scale as the training did that ``restore`` found, if it scaled."""
        state = ((saved.extra if saved is not None else None) or {}).get("scaler")
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(state)
