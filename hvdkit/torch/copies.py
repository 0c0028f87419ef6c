"""Copies of a model from before ``broadcast_state``: a target network, a teacher, an average of the weights."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from hvdkit.torch import private

_LOOKED_AT = 16
_LONGEST = 1000
_MOST = 20_000
_OWN = str(Path(__file__).parents[1])
_NO_HOLDERS = (type, ModuleType, FunctionType, str, bytes, int, float, type(None))
_OF_MODULES = frozenset(vars(torch.nn.Module()))
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors without behaviour of their own; ``torch.nn.Buffer`` makes a ``torch.Tensor``."""
SampledValues = tuple[torch.Size, torch.dtype, tuple[Any, ...]]


class Copies:
    """Warns of tensors that still hold what this rank's model was before it got the root's.

    The first backward after ``broadcast_state`` tells: until then a program may give them the root's values, too.

    Attributes:
        found: of each one the name of the parameter, the tensor, and what it held.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, weakref.ref[torch.Tensor], SampledValues]] = []

    @contextlib.contextmanager
    def found_after(self, model: torch.nn.Module) -> Iterator[None]:
        """In here the model's parameters become those of another rank."""
        before = {name: sample_values(one) for name, one in model.named_parameters()}
        yield
        after = ((name, sample_values(one)) for name, one in model.named_parameters())
        replaced = {old: name for name, new in after if (old := before.get(name)) is not None and old != new}
        if not replaced:
            return
        kinds = {(shape.numel(), dtype) for shape, dtype, _ in replaced}
        for tensor in tensors_in_reach():
            if (tensor.numel(), tensor.dtype) in kinds and (held := sample_values(tensor)) in replaced:
                self.found.append((replaced[held], weakref.ref(tensor), held))

    def tell(self) -> None:
        """A backward has begun, and something was found."""
        found, self.found = self.found, []
        held = [name for name, weak, was in found if (one := weak()) is not None and sample_values(one) == was]
        if held:
            warnings.warn(
                f"a copy of the model was made before broadcast_state: it holds the {held[0]} that this rank began "
                "with, and another rank's copy has other values. Copy the model (for a target network, a teacher, an "
                "average of the weights) after broadcast_state, or give the copy to broadcast_state, too.",
                stacklevel=8,
            )


def tensors_in_reach() -> Iterator[torch.Tensor]:
    """Tensors that the calling program names: its variables, and what these hold, nearest first.

    Neither long containers are looked through, which are data, nor more than ``_MOST`` objects: the heap of a program
    may hold millions. An average of the weights that has had no update counts as not there: it will take the model's.
    """
    near = deque[Any](private.variables_of_callers(but=_OWN))
    seen, left = set[int](), _MOST
    while near and left:
        value = near.popleft()
        if id(value) in seen or isinstance(value, _NO_HOLDERS):
            continue
        seen.add(id(value))
        left -= 1
        if isinstance(value, torch.Tensor):
            if type(value) in PLAIN:
                yield value
        elif len(near) >= left:
            continue  # what it holds would not be looked at
        elif isinstance(value, torch.nn.Module):
            if not isinstance(value, AveragedModel) or value.n_averaged:
                near += [*value.parameters(), *value.buffers()]
                near += [held for name, held in vars(value).items() if name not in _OF_MODULES]
        elif isinstance(value, dict | list | tuple | set | deque):
            if len(value) <= _LONGEST:
                near += value.values() if isinstance(value, dict) else value
        elif hasattr(value, "__dict__"):
            near += vars(value).values()


@torch.no_grad()
def sample_values(tensor: torch.Tensor) -> SampledValues | None:
    """Some of a tensor's numbers, which tell it from others of its kind; None where all are equal or none is there."""
    if type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    numbers: tuple[Any, ...] = ()
    with contextlib.suppress(RuntimeError):  # any tensor of the process may be asked: nested, freed, of an ended vmap
        flat = tensor.detach().reshape(-1)
        numbers = tuple(flat[:: max(1, len(flat) // _LOOKED_AT)][:_LOOKED_AT].tolist())
    return (tensor.shape, tensor.dtype, numbers) if len(set(numbers)) > 1 else None


COPIES = Copies()
