"""The run of a PyTorch training, while it trains; the inside of ``hvdkit.torch.Monitor``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from hvdkit.observe import monitor, step_marks
from hvdkit.steps import torch_tensors
from hvdkit.steps.topology import Topology
from hvdkit.torch.backward import exchanges
from hvdkit.torch.state import RANKS


class Monitor(monitor.Monitor):
    """Watches a loop while it trains; :class:`hvdkit.observe.monitor.Monitor` says what it takes and raises."""

    _ranks = RANKS

    def _held(self, value: Any) -> Any:
        # What a GPU still computes is not waited for now; a copy, since a sum may be added to in place.
        value = value.detach() if isinstance(value, torch.Tensor) else value
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return float(value)
        if value.numel() != 1:
            raise ValueError(f"a tensor of {value.numel()} numbers")
        return torch_tensors.LaterNumber(value.clone())

    def _parameters(self) -> Mapping[str, str]:
        return {name: name for one in exchanges() for name, _ in one.training()}

    def _device_bytes(self) -> float:
        return torch_tensors.device_bytes()


def begin_if_asked(world: Topology) -> None:
    """The monitor of ``hvdkit launch --monitor``: it sees loops over ``record_steps``, else the optimizer's steps."""
    monitor.begin_if_asked(Monitor, world)
    if monitor.automatic() is not None:
        step_marks.torch_optimizers(importlib.import_module("torch.optim.optimizer"))  # torch.optim hides it
