"""``compute()`` of torchmetrics' metrics over all ranks, without ``torch.distributed``; the inside of ``init``.

torchmetrics asks ``torch.distributed`` alone whether there are other ranks. Where that runs, or a metric was given a
``dist_sync_fn``, a ``distributed_available_fn`` or a ``process_group``, torchmetrics' own way stays.
"""

from __future__ import annotations

import functools
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import horovod.torch as hvd
import torch

_MODULE = "torchmetrics.metric"
_ASKED = ("dist_sync_fn", "process_group", "distributed_available")


class _Finder(MetaPathFinder):
    """Finds torchmetrics as Python itself does, for a program that imports it after ``init``."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = next(filter(None, (one.find_spec(name, path, target) for one in sys.meta_path)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_connect(module: ModuleType) -> None:
                execute(module)
                _connect(module)

            spec.loader.exec_module = execute_and_connect  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Have torchmetrics compute over Horovod's ranks, now or when the program imports it."""
    if _MODULE in sys.modules:
        _connect(sys.modules[_MODULE])
    elif not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _connect(module: Any) -> None:
    """Replace ``Metric.sync`` and ``Metric._sync_dist`` of ``torchmetrics.metric``, which knows no other transport."""
    metric, own_check = module.Metric, module.jit_distributed_available
    plain_sync, plain_states = metric.sync, metric._sync_dist
    if hasattr(plain_sync, "hvdkit_plain"):
        return

    @functools.wraps(plain_sync)
    def sync(self: Any, *given: Any, **named: Any) -> None:
        others = hvd.is_initialized() and hvd.size() > 1 and not own_check()
        asked = given or self.process_group or any(named.get(name) for name in _ASKED)
        if others and not asked and self.distributed_available_fn is own_check:
            named.update(dist_sync_fn=_gather, distributed_available=lambda: True)
            with torch.inference_mode(False), torch.no_grad():  # copies that update() may change outside of it
                plain_sync(self, **named)
        else:
            plain_sync(self, *given, **named)

    @functools.wraps(plain_states)
    def sync_states(self: Any, dist_sync_fn: Any = module.gather_all_tensors, process_group: Any = None) -> None:
        if dist_sync_fn is not _gather:
            plain_states(self, dist_sync_fn, process_group)
            return
        everyone = _gather({name: getattr(self, name) for name in self._reductions})
        for name, reduction in self._reductions.items():
            # Lists of several lengths, some empty: as one, which torchmetrics' own way cannot always gather.
            values = [state[name] for state in everyone]
            is_list = isinstance(values[0], list)
            found: Any = [one for rank in values for one in rank] if is_list else torch.stack(values)
            found = _to(found, "cpu" if is_list and self.compute_on_cpu else self.device)
            setattr(self, name, found if reduction is None or (is_list and not found) else reduction(found))

    sync.hvdkit_plain = plain_sync  # type: ignore[attr-defined]
    metric.sync, metric._sync_dist = sync, sync_states


def _gather(states: dict[str, Any]) -> list[dict[str, Any]]:
    return hvd.allgather_object(_to(states, "cpu"), name="hvdkit.torchmetrics")  # type: ignore[no-any-return]


def _to(value: Any, device: Any) -> Any:
    """Its tensors on another device: one that was on a GPU would come back on the GPU of the rank that sent it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {name: _to(one, device) for name, one in value.items()}
    return [_to(one, device) for one in value] if isinstance(value, list) else value
