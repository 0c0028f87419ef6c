"""Which buffers are each rank's own, and whether the ranks agree on the others."""

from __future__ import annotations

import weakref

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from hvdkit.steps import torch_tensors
from hvdkit.steps.untrained import Seen, UntrainedState
from hvdkit.torch.batch_norm import SyncBatchNorm, local_statistics
from hvdkit.torch.nested import flattened
from hvdkit.torch.state import buffers_of, layout, plain_name

_STATES: weakref.WeakKeyDictionary[torch.nn.Module, UntrainedState] = weakref.WeakKeyDictionary()


def own_buffers(model: torch.nn.Module) -> set[str]:
    """Plain names of persistent buffers that are each rank's own: running statistics, and spectral norm's vectors."""
    found = set(local_statistics(model))
    for prefix, module in model.named_modules():
        names: set[str] = set()
        if isinstance(module, _SpectralNorm):
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
            "give every rank the root's by broadcast_state",
            "A buffer that each rank is to have for itself is registered with persistent=False.",
            stacklevel=11,
        )
    return _STATES[model]


def look(model: torch.nn.Module | None) -> Seen:
    """This rank's buffers and frozen weights, as far as they are to be those of every rank."""
    if model is None:
        return Seen([], torch_tensors.digests([]))
    own = own_buffers(model)
    shared = {name: one for name, one in buffers_of(model, persistent=True).items() if name not in own}
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
