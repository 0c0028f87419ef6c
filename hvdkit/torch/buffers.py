"""Which buffers are each rank's own, whether the ranks agree on the others, and the root's before each forward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from hvdkit.steps import torch_tensors
from hvdkit.steps.untrained import Seen, UntrainedState
from hvdkit.torch.batch_norm import SyncBatchNorm, local_statistics
from hvdkit.torch.nested import flattened
from hvdkit.torch.private import eagerly
from hvdkit.torch.state import broadcast_tensors, buffers_of, layout, plain_name, require_torch

_STATES: weakref.WeakKeyDictionary[torch.nn.Module, UntrainedState] = weakref.WeakKeyDictionary()
_EACH_STEP: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
_OBSERVERS = ("torch.ao.quantization", "torchao.quantization")


def own_buffers(model: torch.nn.Module) -> set[str]:
    """Plain names of persistent buffers that are each rank's own: statistics of its samples, and steps towards a norm.

    These are running statistics of BatchNorm and of modules that name theirs likewise, observers of quantization, and
    the vectors of spectral norm.
    """
    found = set(local_statistics(model))
    for prefix, module in model.named_modules():
        names: set[str] = set()
        kinds = [cls.__module__ for cls in type(module).__mro__]
        if isinstance(module, _SpectralNorm) or any(kind.startswith(_OBSERVERS) for kind in kinds):
            names.update(module._buffers)
        elif not isinstance(module, SyncBatchNorm):
            names.update(one for one in module._buffers if one.startswith(("running_", "moving_")))
        if isinstance(module, _NormBase):
            names.add("num_batches_tracked")
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                names.update((f"{hook.name}_u", f"{hook.name}_v"))
        found.update(plain_name(f"{prefix}.{name}" if prefix else name) for name in names)
    return found


def untrained_of(model: torch.nn.Module) -> UntrainedState:
    """What the ranks have seen of this model."""
    if model not in _STATES:
        _STATES[model] = UntrainedState(
            "give every rank the root's by broadcast_state, once or with buffers='each step'",
            "A buffer that each rank is to have for itself is registered with persistent=False.",
            stacklevel=12,
        )
    return _STATES[model]


def look(model: torch.nn.Module | None) -> Seen:
    """This rank's buffers and frozen weights, as far as they are to be those of every rank."""
    if model is None:
        return Seen([], torch_tensors.digests([]))
    own = own_buffers(model)
    shared = (
        {} if model in _EACH_STEP else {k: v for k, v in buffers_of(model, persistent=True).items() if k not in own}
    )
    weights = {plain_name(name): one.detach() for name, one in model.named_parameters() if not one.requires_grad}
    tensors = {layout(name, one): one for name, one in flattened({**shared, **weights}).items() if _is_plain(one)}
    values = {}
    for row in tensors.keys() & untrained_of(model).suspects.keys():  # on the host, with its epsilon
        real = torch.view_as_real(tensors[row]) if tensors[row].is_complex() else tensors[row]
        epsilon = torch.finfo(real.dtype).eps if real.is_floating_point() else 0.0
        values[row] = real.detach().double().cpu().numpy().copy(), epsilon
    frozen = {layout(name, one) for name, one in flattened(weights).items()}
    return Seen(list(tensors), torch_tensors.digests(list(tensors.values())), values, frozen)


def _is_plain(tensor: torch.Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return dense and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not torch.nn.parameter.is_lazy(tensor)


def broadcast_each_step(model: torch.nn.Module, root: int) -> None:
    """Give every rank the root's persistent buffers before each forward of the model in training."""
    require_torch(model)
    end_each_step(model)

    @eagerly
    def before_forward(module: torch.nn.Module, args: Any) -> None:  # noqa: ARG001
        if module.training and torch.is_grad_enabled():  # evaluation may be one rank's alone
            broadcast_tensors(buffers_of(module, persistent=True).values(), root)

    _EACH_STEP[model] = model.register_forward_pre_hook(before_forward)


def end_each_step(model: torch.nn.Module) -> None:
    """No longer do what ``broadcast_each_step`` has begun."""
    handle = _EACH_STEP.pop(model, None)
    if handle is not None:
        handle.remove()
