"""How the state of a PyTorch training is named, compared and sent between ranks; the inside of ``hvdkit.torch``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import horovod.torch as hvd
import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import agreement
from hvdkit.steps.collectives import OverHorovod
from hvdkit.torch import seeds

RANKS = OverHorovod(hvd, torch.from_numpy)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model by name.

    Raises:
        InvalidArgumentError: lazy parameters that have no shape yet.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lazy = [name for name, tensor in tensors.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise InvalidArgumentError(
            f"the model is not built yet: {', '.join(lazy[:3])} has no shape; run one batch "
            "through it on every rank first."
        )
    return tensors


def layout(name: str, tensor: torch.Tensor) -> str:
    """Name, type and shape, for digests and messages."""
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def broadcast(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, root: int = 0) -> None:
    """The inside of ``hvdkit.torch.broadcast_state``."""
    if not 0 <= root < hvd.size():
        raise InvalidArgumentError(f"root must be a rank in 0 .. {hvd.size() - 1}, got {root}.")
    tensors = model_tensors(model)
    agreement.require_same_rows(RANKS, [layout(name, tensor) for name, tensor in tensors.items()])
    broadcast_tensors(tensors.values(), root)
    if optimizer is not None:
        broadcast_optimizer(optimizer, root)
    seeds.move_to_own_stream()


def broadcast_tensors(tensors: Iterable[torch.Tensor], root: int) -> None:
    """Broadcast in place, as bytes: exact for every dtype, those that Horovod cannot add up included."""
    pending = []
    for number, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        contiguous = tensor.detach().contiguous()
        flat = contiguous.reshape(-1).view(torch.uint8)
        pending.append((tensor, contiguous, hvd.broadcast_async_(flat, root, name=f"hvdkit.broadcast_state.{number}")))
    for tensor, contiguous, handle in pending:
        hvd.synchronize(handle)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(contiguous)


def broadcast_optimizer(optimizer: torch.optim.Optimizer, root: int) -> None:
    """Give every rank the root's optimizer state, also where the others have none yet; a collective."""
    state = optimizer.state_dict() if hvd.rank() == root else None
    tensors: list[torch.Tensor] = []
    outline = hvd.broadcast_object(_outline(state, tensors), root, name="hvdkit.optimizer_outline")
    if hvd.rank() != root:
        tensors = []
        state = _from_outline(outline, tensors)
    broadcast_tensors(tensors, root)
    if hvd.rank() != root:
        optimizer.load_state_dict(cast(dict[str, Any], state))


class _Slot:
    """Stands for a tensor of an optimizer state while the state's structure travels."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device_type = tuple(tensor.shape), tensor.dtype, tensor.device.type

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(value)
    return _rebuild(value, lambda item: _outline(item, tensors))


def _from_outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Slot):
        tensors.append(value.empty())
        return tensors[-1]
    return _rebuild(value, lambda item: _from_outline(item, tensors))


def _rebuild(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: convert(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(convert(item) for item in value)
    return value


class HostCopies:
    """Copies of state dicts in the host's memory, which is used again by the next copy of the same name."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def of(self, name: str, value: Any) -> Any:
        """A copy of tensors in dicts, lists and tuples; other values as they are."""
        if isinstance(value, torch.Tensor):
            kept = self._kept.get(name)
            if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                kept = self._kept[name] = torch.empty(value.shape, dtype=value.dtype)
            return kept.copy_(value.detach())
        if isinstance(value, dict):
            copies: Any = type(value)((key, self.of(f"{name}.{key}", item)) for key, item in value.items())
            if hasattr(value, "_metadata"):  # the versions of a model's modules
                copies._metadata = value._metadata
            return copies
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(f"{name}.{index}", item) for index, item in enumerate(value))
        return value
