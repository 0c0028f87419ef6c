"""Do all ranks hold the same PyTorch training? The inside of ``hvdkit.torch``'s ``check_agreement``."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from hvdkit.steps import agreement, torch_tensors
from hvdkit.steps.topology import Topology
from hvdkit.torch import seeds
from hvdkit.torch.data import require_sharded
from hvdkit.torch.divergence import own_buffers
from hvdkit.torch.state import RANKS, flattened, layout, model_tensors, rebuilt, state_of


def check_agreement(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world: Topology,
    *,
    loader: Any = None,
    statistics: bool = False,
) -> None:
    """Check that all ranks hold bit-identical parameters, buffers and optimizer state; a collective.

    Tensors are digested on the device where they are, and one allreduce of 16 bytes compares the digests; only when
    they differ is more sent, to say where. After ``seed_everything`` its seed is compared too, and that PyTorch's
    generator was not seeded anew behind its back.

    Args:
        model: parameters and buffers are compared.
        optimizer: its slots, step counters and settings (the learning rate) are compared.
        world: the job.
        loader: from ``shard``: its epoch, seed and sizes are compared.
        statistics: compare BatchNorm's running statistics as well. They are each rank's own unless the model was given
            to ``sync_batch_norm``, or after ``average_statistics``; those of synchronised ones are always compared.
    Raises:
        AgreementError: on every rank; names the first differing tensor, the ranks on each side and, where the
            layouts match, the largest difference.
        InvalidArgumentError: a loader that is not from ``shard``, or a model that is not built yet.
    """
    own = own_buffers(model) if not statistics else set()
    tensors = {name: tensor.detach() for name, tensor in model_tensors(model).items() if name not in own}
    if optimizer is not None:
        tensors.update(_optimizer_tensors(optimizer))
    tensors = flattened(tensors)
    fixes = {}
    loaders = {} if loader is None else require_sharded(loader).share.facts(loader.epoch)
    for facts, fix in ((loaders, agreement.ITERATE_ALIKE), (seeds.facts(), agreement.SEED_ALIKE)):
        tensors.update({name: torch.tensor(value, dtype=torch.float64) for name, value in facts.items()})
        fixes.update(dict.fromkeys(facts, fix))
    if world.size > 1:
        rows = [layout(name, tensor) for name, tensor in tensors.items()]
        digests = torch_tensors.digests(list(tensors.values()))

        def value_at(position: int) -> tuple[str, npt.NDArray[Any]]:
            name, tensor = list(tensors.items())[position]
            exact = tensor.cpu()
            return name, (exact.double() if tensor.is_floating_point() else exact).numpy()  # NumPy has no bfloat16

        agreement.require_same_values(RANKS, rows, digests, value_at, fixes)
    seeds.require_own_stream()


class CheckAgreement(agreement.EveryFewSteps):
    """``check_agreement`` every ``every`` steps: call ``step()`` after each step of the optimizer, on all ranks.

    Args:
        model, optimizer, world, loader, statistics: see ``check_agreement``.
        every: steps from one check to the next, the same on every rank.
        on_disagreement: "raise" (on every rank, none waits for another) or "warn" and train on.
    Raises:
        InvalidArgumentError: ``every`` below 1, or an unknown reaction.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: Topology,
        every: int = 100,
        *,
        loader: Any = None,
        statistics: bool = False,
        on_disagreement: str = "raise",
    ) -> None:
        def check() -> None:
            check_agreement(model, optimizer, world, loader=loader, statistics=statistics)

        super().__init__(check, every, on_disagreement)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Slots and numeric settings (learning rate, ...) of an optimizer, by a name that all ranks share."""
    tensors: dict[str, torch.Tensor] = {}

    def collect(value: Any, path: tuple[Any, ...]) -> None:
        name = ".".join(map(str, ("optimizer", *path)))
        if isinstance(value, torch.Tensor):
            tensors[name] = value.detach()
        elif isinstance(value, (bool, int, float)):
            tensors[name] = torch.tensor(value, dtype=torch.float64)

    rebuilt(state_of(optimizer), collect)
    return tensors
