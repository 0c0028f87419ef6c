"""The weights of a PyTorch optimizer whose groups of ranks meet in outer steps (``distribute(every=...)``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.outer import Array, OuterLoop, OuterOptions, Weights
from hvdkit.torch.private import eagerly
from hvdkit.torch.state import RANKS, layout, parameters_of, plain_name


class TorchWeights(Weights):
    """What an optimizer trains now."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: dict[int, str], parameters: list[Any]) -> None:
        self._optimizer, self._parameters = weakref.ref(optimizer), parameters
        self.rows = [layout(named.get(id(one), f"parameter.{place}"), one) for place, one in enumerate(parameters)]
        self.sizes = [one.numel() for one in parameters]

    def get(self, places: Sequence[int]) -> list[Array]:
        return [_on_host(self._parameters[place]) for place in places]

    @torch.no_grad()
    def put(self, places: Sequence[int], values: Sequence[Array]) -> None:
        for place, value in zip(places, values, strict=True):
            parameter = self._parameters[place]
            parameter.copy_(torch.from_numpy(value).view(parameter.shape))

    @torch.no_grad()
    def average_slots(self, mean: Callable[[Array], Array]) -> None:
        state = getattr(self._optimizer(), "state", {})
        values = [value for one in self._parameters for _, value in sorted(state.get(one, {}).items())]
        slots = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
        if slots:
            flat = mean(np.concatenate([_on_host(slot).reshape(-1) for slot in slots]))
            parts = np.split(flat, np.cumsum([slot.numel() for slot in slots])[:-1])
            for slot, part in zip(slots, parts, strict=True):
                slot.copy_(torch.from_numpy(part).view(slot.shape))


def _on_host(tensor: torch.Tensor) -> Array:
    wide = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
    return wide.cpu().numpy()


def take_outer_steps(optimizer: torch.optim.Optimizer, model: torch.nn.Module, options: OuterOptions) -> None:
    """Have an optimizer take outer steps, after every ``options.every`` of its own."""
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise InvalidArgumentError(
            f"every={options.every} counts the steps of a torch.optim optimizer, and {type(optimizer).__name__} never "
            "called Optimizer.__init__; give distribute the optimizer within it."
        )
    outer = OuterLoop(options, RANKS)
    known: list[int] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
        trained = [one for one in parameters_of(optimizer) if one.requires_grad]
        if outer.weights is None or list(map(id, trained)) != known:
            known[:] = map(id, trained)
            named = {id(one): plain_name(name) for name, one in model.named_parameters()}
            outer.begin(TorchWeights(optimizer, named, trained))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
        steps, due = outer.tick()
        if due:
            outer.take(steps)

    optimizer.register_step_pre_hook(eagerly(before))
    optimizer.register_step_post_hook(eagerly(after))
