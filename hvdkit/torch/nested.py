"""Tensors in dicts, lists and tuples: copied, told to other ranks without their contents, put into others in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Leaf = Callable[[Any, tuple[Any, ...]], Any]


def rebuilt(value: Any, leaf: Leaf, path: tuple[Any, ...] = ()) -> Any:
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
