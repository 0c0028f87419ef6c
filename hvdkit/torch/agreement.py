"""Do all ranks hold the same PyTorch training? The inside of ``hvdkit.torch``'s ``check_agreement``."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdkit.steps import agreement
from hvdkit.steps.topology import Topology
from hvdkit.torch import seeds
from hvdkit.torch.batch_norm import local_statistics
from hvdkit.torch.data import require_sharded
from hvdkit.torch.state import RANKS, layout, model_tensors

_CHUNK_ON_A_GPU = 2**20  # words; few kernels count more than the cache there
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    tensors = {name: tensor.detach() for name, tensor in model_tensors(model).items()}
    if not statistics:
        for name in local_statistics(model):
            del tensors[name]
    if optimizer is not None:
        tensors.update(_optimizer_tensors(optimizer))
    fixes = {}
    for facts, fix in ((_loader_facts(loader), agreement.ITERATE_ALIKE), (seeds.facts(), agreement.SEED_ALIKE)):
        tensors.update({name: torch.tensor(value, dtype=torch.float64) for name, value in facts.items()})
        fixes.update(dict.fromkeys(facts, fix))
    if world.size > 1:
        rows = [layout(name, tensor) for name, tensor in tensors.items()]
        digests = _digests(list(tensors.values()))
        agreement.require_same_values(RANKS, rows, digests, lambda at: _on_host(*list(tensors.items())[at]), fixes)
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


def _digests(tensors: list[torch.Tensor]) -> npt.NDArray[np.int64]:
    """A digest of each tensor's bits, int64 (len(tensors),); made on its device, fetched together."""
    digests = [digest(tensor) for tensor in tensors]
    result = np.zeros(len(tensors), dtype=np.int64)
    for device in {digest.device for digest in digests}:
        positions = [position for position, digest in enumerate(digests) if digest.device == device]
        result[positions] = torch.stack([digests[position] for position in positions]).cpu().numpy()
    return result


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A digest of a tensor's bits, int64 (), on its device."""
    if tensor.device.type == "cpu":  # NumPy mixes faster there
        return torch.from_numpy(agreement.array_digests([_words(tensor).numpy()]))[0]
    return digest_on_device(tensor, _CHUNK_ON_A_GPU)


def digest_on_device(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """The same by PyTorch's operations, on ``chunk`` words at once; another number gives another digest."""
    salts = _salts(chunk, tensor.device)
    parts = _words(tensor).split(chunk)  # type: ignore[no-untyped-call]
    sums = (agreement.salted(part.long(), salts[: len(part)]).sum() for part in parts)
    return torch.as_tensor(agreement.join_chunks(sums), device=tensor.device)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers: eight bytes in each where that comes out even."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.contiguous().reshape(-1)
    size = flat.element_size()
    if len(flat) == 0 or len(flat) * size % 8:
        return flat.view(_WORDS[size])
    return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)


@functools.cache
def _salts(count: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(agreement.salts(count)).to(device)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Slots and numeric settings (learning rate, ...) of an optimizer, by a name that all ranks share."""
    tensors: dict[str, torch.Tensor] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors[prefix] = value.detach()
        elif isinstance(value, (bool, int, float)):
            tensors[prefix] = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(f"{prefix}.{key}", item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                collect(f"{prefix}.{index}", item)

    collect("optimizer", optimizer.state_dict())
    return tensors


def _loader_facts(loader: Any) -> dict[str, float]:
    if loader is None:
        return {}
    facts: dict[str, float] = require_sharded(loader).share.facts(loader.epoch)
    if isinstance(loader.dataset, torch.utils.data.Subset):  # random_split draws another one where it is not seeded
        facts["loader.subset"] = float(zlib.crc32(np.asarray(loader.dataset.indices, dtype=np.int64).tobytes()))
    return facts


def _on_host(name: str, tensor: torch.Tensor) -> tuple[str, npt.NDArray[Any]]:
    exact = tensor.cpu()
    return name, (exact.double() if tensor.is_floating_point() else exact).numpy()  # NumPy has no bfloat16
