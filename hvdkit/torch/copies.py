"""Copies of a model from before ``broadcast_state``: a target network, a teacher, an average of the weights."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

_LOOKED_AT = 16
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors without behaviour of their own; ``torch.nn.Buffer`` makes a ``torch.Tensor``."""
SampledValues = tuple[torch.Size, torch.dtype, tuple[Any, ...]]


class Copies:
    """Warns of tensors that still hold what this rank's model was before it got the root's.

    The first backward after ``broadcast_state`` tells: until then a program may give them the root's values, too.
    """

    def __init__(self) -> None:
        self._found: list[tuple[str, weakref.ref[torch.Tensor], SampledValues]] = []

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
        objects = gc.get_objects()
        # Until its first update, PyTorch's average of the weights is what it will not use.
        averages = (one for one in objects if type(one) is AveragedModel and not one.n_averaged)
        unused = {id(one) for average in averages for one in average.parameters()}
        for one in objects:
            if id(one) in unused:
                continue
            if type(one) in PLAIN and (one.numel(), one.dtype) in kinds and (held := sample_values(one)) in replaced:
                self._found.append((replaced[held], weakref.ref(one), held))

    def tell(self) -> None:
        """A backward has begun."""
        if not self._found:
            return
        found, self._found = self._found, []
        held = [name for name, weak, was in found if (one := weak()) is not None and sample_values(one) == was]
        if held:
            warnings.warn(
                f"a copy of the model was made before broadcast_state: it holds the {held[0]} that this rank began "
                "with, and another rank's copy has other values. Copy the model (for a target network, a teacher, an "
                "average of the weights) after broadcast_state, or give the copy to broadcast_state, too.",
                stacklevel=8,
            )


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
