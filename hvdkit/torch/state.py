"""How the state of a PyTorch training is named, compared and sent between ranks; the inside of ``hvdkit.torch``."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common import process_sets
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hvdkit.core.communicator import OverHorovod, on_root
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import agreement
from hvdkit.torch import seeds


def tensorflow_at_work() -> Any:
    """``horovod.tensorflow`` where it has been started: ranks reach each other over the first that was."""
    module = sys.modules.get("horovod.tensorflow")
    return module if module is not None and module.is_initialized() else None


# Horovod's process sets are those of the framework that was imported last, and TensorFlow's is at work.
if (_connected := tensorflow_at_work()) is not None:
    process_sets._setup(_connected.mpi_ops._basics)


class TorchRanks(OverHorovod):
    """Also within ``torch.inference_mode``: Horovod's thread may not write to the tensors that are made there."""

    def __init__(self, process_set: Any = None) -> None:
        super().__init__(hvd, torch.from_numpy, process_set)

    def size(self) -> int:
        """1 where Horovod was not started: a job of ``torch.distributed`` shards, too, and its ranks are others."""
        return super().size() if hvd.is_initialized() else 1

    start = torch.inference_mode(False)(OverHorovod.start)
    broadcast_object = torch.inference_mode(False)(OverHorovod.broadcast_object)


RANKS = TorchRanks()
_WRAPPER = "module."  # before each name in the state of a model in DistributedDataParallel or DataParallel
DISTRIBUTED = "_hvdkit_distributed"
"""Attribute of an optimizer that ``distribute`` got, for the comparison of ranks: one that did alone waits forever."""
SHARDED = "_hvdkit_sharded"
"""Attribute of an optimizer whose state is divided among the ranks: its ``ShardedOptimizer``."""


def plain_name(name: str) -> str:
    """The name that a parameter, buffer or module has before ``torch.compile`` wraps the model or modules of it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def require_torch(model: Any, optimizer: Any = None) -> None:
    """Raise InvalidArgumentError where these are no model and optimizer, but several, in a dict or list."""
    if not hasattr(model, "named_parameters"):
        raise InvalidArgumentError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; put several into one: "
            "torch.nn.ModuleDict({'generator': generator, 'critic': critic})."
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise InvalidArgumentError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; broadcast several one by one, "
            "each with its own model, and save the others as extra={'critic': optimizer.state_dict()}."
        )


def buffers_of(model: torch.nn.Module, persistent: bool) -> dict[str, torch.Tensor]:
    """Buffers by plain names: those that a checkpoint holds, or (``persistent=False``) this rank's caches."""
    return {
        plain_name(f"{prefix}.{name}" if prefix else name): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and (name not in getattr(module, "_non_persistent_buffers_set", ())) == persistent
    }


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a model by their plain names."""
    parameters = {plain_name(name): one for name, one in model.named_parameters()}
    tensors = {**parameters, **buffers_of(model, persistent=True)}
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


def model_state(model: torch.nn.Module, trainable_only: bool = False) -> dict[str, Any]:
    """``model.state_dict()`` by plain names, without what wraps the model; or what of it training changes."""
    state: Any = model.state_dict()
    named = bare_names(state)
    wanted = trained_names(model) if trainable_only else named.keys()
    kept: Any = OrderedDict((name, state[full]) for name, full in named.items() if name in wanted)
    kept._metadata = OrderedDict(  # the versions of a model's modules
        (name, state._metadata[full]) for name, full in bare_names(state, getattr(state, "_metadata", {})).items()
    )
    return kept  # type: ignore[no-any-return]


def bare_names(state: Iterable[str], modules: Iterable[str] | None = None) -> dict[str, str]:
    """Names by those without ``_orig_mod.`` (torch.compile) and a ``module.`` before all of a state dict's (DDP).

    Those of the state dict, or of ``modules`` of its model.
    """
    named = {plain_name(name): name for name in state}
    start = len(_WRAPPER) if named and all(name.startswith(_WRAPPER) for name in named) else 0
    if modules is not None:
        named = {plain_name(name): name for name in modules if name or not start}
    return {name[start:]: full for name, full in named.items()}


def trained_names(model: torch.nn.Module) -> set[str]:
    """The bare names of what training changes: parameters that train, and persistent buffers."""
    trains = {plain_name(name) for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
    named = bare_names(model.state_dict())
    return {
        name for name, full in named.items() if plain_name(full) in trains | buffers_of(model, persistent=True).keys()
    }


def load_model(model: torch.nn.Module, state: dict[str, Any], strict: bool = True) -> None:
    """``model.load_state_dict`` of what ``model_state`` returned, for this model wrapped or not."""
    mine = model.state_dict()
    tensors = bare_names(mine)
    modules = bare_names(mine, (name for name, _ in model.named_modules(remove_duplicate=False)))
    renamed: Any = OrderedDict((tensors.get(name, name), state[full]) for name, full in bare_names(state).items())
    versions = getattr(state, "_metadata", {})
    renamed._metadata = OrderedDict(
        (modules.get(name, name), versions[full]) for name, full in bare_names(state, versions).items()
    )
    model.load_state_dict(renamed, strict=strict)


def broadcast(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, root: int = 0) -> None:
    """The inside of ``hvdkit.torch.broadcast_state``."""
    if not 0 <= root < hvd.size():
        raise InvalidArgumentError(f"root must be a rank in 0 .. {hvd.size() - 1}, got {root}.")
    require_same_training(model, optimizer)
    send(model, optimizer, root)
    seeds.move_to_own_stream()


def require_same_training(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise AgreementError on every rank unless model and optimizer are of the same names, shapes and groups."""
    tensors = model_tensors(model)
    rows = [layout(name, tensor) for name, tensor in tensors.items()]
    names = {id(tensor): name for name, tensor in tensors.items()}
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        kind = f"{type(optimizer).__name__}{getattr(optimizer, DISTRIBUTED, '')} group {number}"
        rows += [layout(f"{kind} {names.get(id(one), 'of no model')}", one) for one in group["params"]]
    agreement.require_same_rows(RANKS, rows, "hold different models or optimizers", "build the same")


def send(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, root: int) -> None:
    """Give every rank the root's tensors and optimizer state, in place; a collective."""
    broadcast_tensors(model_tensors(model).values(), root)
    caches = buffers_of(model, persistent=False)
    table = agreement.digest_table(layout(name, one) for name, one in caches.items())
    if agreement.agree(RANKS, table, "hvdkit.caches"):  # else they grew with the batches
        broadcast_tensors(caches.values(), root)
    _send_extra_states(model, root)
    if optimizer is None:
        return
    name = "hvdkit.optimizer_outline"
    if hasattr(optimizer, SHARDED):  # each rank's state is its own
        broadcast_nested(optimizer.param_groups, root, name, parameters_of(optimizer))
    elif keeps_its_state_itself(optimizer):
        received = broadcast_nested(optimizer.state_dict(), root, name)
        if hvd.rank() != root:
            optimizer.load_state_dict(received)
    else:
        broadcast_nested(_live_state(optimizer), root, name, parameters_of(optimizer))


def _send_extra_states(model: torch.nn.Module, root: int) -> None:
    """What modules keep beside tensors, and give by ``get_extra_state``."""
    usual = torch.nn.Module.get_extra_state
    holders = [module for module in model.modules() if type(module).get_extra_state is not usual]
    if not holders:
        return
    mine = [module.get_extra_state() for module in holders] if hvd.rank() == root else None
    received = broadcast_nested(mine, root, "hvdkit.extra_states")
    for module, extra in zip(holders, received, strict=True) if hvd.rank() != root else ():
        module.set_extra_state(extra)


def broadcast_tensors(tensors: Iterable[torch.Tensor], root: int) -> None:
    """Broadcast in place, as bytes: exact for every dtype, those that Horovod cannot add up included."""
    pending = []
    plain = flattened({str(number): tensor for number, tensor in enumerate(tensors)})
    for number, tensor in enumerate(plain.values()):
        if tensor.numel() == 0:
            continue
        contiguous = tensor.detach().contiguous()
        flat = contiguous.reshape(-1).view(torch.uint8)
        pending.append((tensor, contiguous, hvd.broadcast_async_(flat, root, name=f"hvdkit.broadcast_state.{number}")))
    for tensor, contiguous, handle in pending:
        hvd.synchronize(handle)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(contiguous)


def broadcast_nested(value: Any, root: int, name: str, parameters: Iterable[torch.Tensor] = ()) -> Any:
    """The root's tensors in dicts, lists and tuples, put into this rank's ``value`` where they fit; a collective.

    ``parameters`` do not travel: they are told by their number.
    """
    outline = Outline(parameters)
    received = on_root(
        hvd.rank() == root, lambda: outline.of(value), lambda outcome: hvd.broadcast_object(outcome, root, name=name)
    )
    if hvd.rank() == root:
        broadcast_tensors(outline.tensors, root)
        return value
    placing = Placing(parameters)
    placed = placing.place(value, received)
    broadcast_tensors(placing.awaited(), root)
    return placed


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict`` that changes groups, states and tensors in place; where it fails, nothing."""
    if keeps_its_state_itself(optimizer):
        optimizer.load_state_dict(state)
        return
    before = _live_state(optimizer)
    try:
        optimizer.load_state_dict(state)
        loaded = _live_state(optimizer)
    finally:
        optimizer.param_groups, optimizer.state = before["param_groups"], before["state"]
    placing = Placing(parameters_of(optimizer))
    placing.place(before, loaded)
    placing.copy()


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state_dict; without the state where that is divided among the ranks."""
    sharded = getattr(optimizer, SHARDED, None)
    found: dict[str, Any] = optimizer.state_dict() if sharded is None else sharded.outline(optimizer)
    return found


def keeps_its_state_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class has other ways for its state than PyTorch's: around another optimizer, or compressed."""
    own, usual = type(optimizer), torch.optim.Optimizer
    return own.state_dict is not usual.state_dict or own.load_state_dict is not usual.load_state_dict


def _live_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"param_groups": optimizer.param_groups, "state": optimizer.state}


def sample_of(model: torch.nn.Module) -> bytes:
    """Some of a model's weights, for ``passes``."""
    weights = [one.detach() for one in model.parameters() if type(one) is torch.nn.Parameter and one.numel()]
    rows = [one[(-1,) * (one.dim() - 1)].reshape(-1)[:4] for one in weights[:: 1 + len(weights) // 32]]
    numbers = [one.double() for one in rows if one.is_floating_point() and not one.is_meta]
    return b"".join(one.cpu().numpy().tobytes() for one in numbers)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All that it holds, each once, in the order of its groups."""
    return list({id(one): one for group in optimizer.param_groups for one in group["params"]}.values())


def plain_number(value: Any, path: tuple[Any, ...] = ()) -> Any:  # noqa: ARG001
    """Python's number for one of NumPy's, which a file could hold, but not be read again without pickle."""
    return value.item() if isinstance(value, np.generic) else value


class HostCopies:
    """Copies of state dicts in the host's memory, which is used again by the next copy of the same name."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, name: str, value: Any) -> Any:
        """A copy of tensors in dicts, lists and tuples; NumPy's numbers as Python's, other values as they are."""
        copied: dict[int, torch.Tensor] = {}  # what occurs twice is one tensor in the copy, too

        def copy(item: Any, path: tuple[Any, ...]) -> Any:
            if not isinstance(item, torch.Tensor):
                return plain_number(item)
            if id(item) in copied:
                return copied[id(item)]
            kept = self._kept.get(path)
            if not is_dense(item):
                kept = on_host(item)
            elif kept is None or kept.shape != item.shape or kept.dtype != item.dtype:
                kept = self._kept[path] = on_host(item).contiguous()
            else:
                kept.copy_(item.detach())
            copied[id(item)] = kept
            return kept

        return rebuilt(value, copy, (name,))


# Tensors in dicts, lists and tuples: copied, told to other ranks without their contents, put into others in place -----


def rebuilt(value: Any, leaf: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """A copy of nested dicts, lists and tuples.

    Args:
        leaf: what stands in the place of any other value, and of a tensor that is a key, at a path of keys and indices.
    """
    if isinstance(value, dict):
        made = copy.copy(value)  # also what is beside the items, such as the versions of a model's modules
        made.clear()
        for key, item in value.items():
            own = leaf(key, path) if isinstance(key, torch.Tensor) else key
            made[own] = rebuilt(item, leaf, (*path, key))
        return made
    if _is_sequence(value):
        return _like(value, [rebuilt(item, leaf, (*path, index)) for index, item in enumerate(value)])
    return leaf(value, path)


def flattened(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Named tensors with those of a subclass (torchao's) in the place of the one that they make up."""
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_traceable_wrapper_subclass(tensor):
            parts: Any = tensor.__tensor_flatten__()[0]
            plain.update(flattened({f"{name}.{part}": getattr(tensor, part) for part in parts}))
        else:
            plain[name] = tensor
    return plain


def on_host(tensor: Any) -> Any:
    """A copy of a tensor in the host's memory; of a subclass that is made of other tensors, one of copies of these."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach().to("cpu", copy=True)
    parts, context = tensor.__tensor_flatten__()
    copies = {part: on_host(getattr(tensor, part)) for part in parts}
    return type(tensor).__tensor_unflatten__(copies, context, tensor.shape, tensor.stride())


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not isinstance(value, torch.Size)


def _like(sequence: Any, items: list[Any]) -> Any:
    kind = type(sequence)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)  # a named tuple takes them one by one


@dataclass(frozen=True)
class _Known:
    """Stands for a tensor that every rank has."""

    number: int


class _Slot:
    """Stands for a dense tensor that travels beside the outline; one for each, however often it occurs."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device_type = tuple(tensor.shape), tensor.dtype, tensor.device.type


class Outline:
    """What the root tells of a nested value; ``tensors`` are those that it leaves out, in their order.

    What every rank has, ``known``, is told by its number.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        self._stand_ins: dict[int, Any] = {id(one): _Known(number) for number, one in enumerate(known)}
        self.tensors: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        """``value`` with stand-ins for its tensors, and copies in the host's memory of those that are not dense."""
        return rebuilt(value, self._leaf)

    def _leaf(self, value: Any, path: tuple[Any, ...]) -> Any:  # noqa: ARG002
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._stand_ins:
            if is_dense(value):
                self._stand_ins[id(value)] = _Slot(value)
                self.tensors.append(value)
            else:
                self._stand_ins[id(value)] = on_host(value)
        return self._stand_ins[id(value)]


class Placing:
    """Puts a nested value, or its outline, into another: dicts and lists, and tensors that fit, stay the same objects.

    ``known`` is what stand-ins of ``Outline`` stand for; it is not overwritten.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        self._known = list(known)
        self._taken = {id(one) for one in self._known}
        self._placed: dict[int, tuple[Any, torch.Tensor]] = {}  # by the identity of what is placed

    def place(self, mine: Any, theirs: Any, device: torch.device | None = None) -> Any:
        """What is to stand in the place of ``mine``: ``mine`` itself, changed to be as ``theirs``, where that goes."""
        if isinstance(theirs, _Known):
            return self._known[theirs.number]
        if isinstance(theirs, (torch.Tensor, _Slot)):
            return self._tensor(mine, theirs, device)
        if isinstance(theirs, dict):
            return self._dict(mine, theirs, device)
        if not _is_sequence(theirs):
            return theirs
        old = mine if isinstance(mine, (list, tuple)) else ()
        items = [
            self.place(old[index] if index < len(old) else None, item, device) for index, item in enumerate(theirs)
        ]
        if isinstance(mine, list) and isinstance(theirs, list):
            mine[:] = items
            return mine
        return _like(theirs, items)

    def _dict(self, mine: Any, theirs: dict[Any, Any], device: torch.device | None) -> dict[Any, Any]:
        items = {}
        for key, item in theirs.items():
            own = self._known[key.number] if isinstance(key, _Known) else key
            old = mine.get(own) if isinstance(mine, dict) else None
            items[own] = self.place(old, item, own.device if isinstance(own, torch.Tensor) else device)
        made = mine if isinstance(mine, dict) else copy.copy(theirs)
        made.clear()
        made.update(items)
        return made

    def _tensor(self, mine: Any, theirs: torch.Tensor | _Slot, device: torch.device | None) -> torch.Tensor:
        if id(theirs) not in self._placed:
            if id(mine) not in self._taken and _fits(mine, theirs):
                target = mine
            elif isinstance(theirs, torch.Tensor):
                target = theirs if is_dense(theirs) or device is None else theirs.to(device)
            else:
                there = device if device is not None and device.type == theirs.device_type else theirs.device_type
                target = torch.empty(theirs.shape, dtype=theirs.dtype, device=there)
            self._taken.add(id(target))
            self._placed[id(theirs)] = theirs, target
        return self._placed[id(theirs)][1]

    def awaited(self) -> list[torch.Tensor]:
        """The places of what an outline left out, in its order."""
        return [target for theirs, target in self._placed.values() if isinstance(theirs, _Slot)]

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the tensors that were placed into others."""
        for theirs, target in self._placed.values():
            if target is not theirs:
                target.copy_(theirs)


def is_dense(tensor: Any) -> bool:
    """Whether its numbers are its memory."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not is_traceable_wrapper_subclass(tensor)
    )


def _fits(mine: Any, theirs: torch.Tensor | _Slot) -> bool:
    if not is_dense(mine) or not (isinstance(theirs, _Slot) or is_dense(theirs)):
        return False
    device_type = theirs.device_type if isinstance(theirs, _Slot) else theirs.device.type
    return (tuple(mine.shape), mine.dtype, mine.device.type) == (tuple(theirs.shape), theirs.dtype, device_type)
