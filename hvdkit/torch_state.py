"""How the state of a PyTorch training is named, compared and sent between ranks; the inside of ``hvdkit.torch``."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import torch

from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps import agreement, metrics
from hvdkit.steps.root import on_root as on_root_of
from hvdkit.steps.shards import Batch, Shard
from hvdkit.steps.topology import Topology


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


def _layout(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def require_same_layout(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise an AgreementError on every rank when names, types or shapes differ between ranks; a collective."""
    rows = [_layout(name, tensor) for name, tensor in tensors.items()]
    difference = agreement.first_difference(gather_tables(agreement.digest_table({row: () for row in rows})))
    if difference is not None:
        raise agreement.layout_error(difference, rows, hvd.rank())


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


def gather_tables(table: agreement.Digests) -> list[agreement.Digests]:
    """Every rank's digest table, in rank order; tables may differ in length."""
    lengths = hvd.allgather(torch.tensor([len(table)], dtype=torch.int64), name="hvdkit.digest_lengths").tolist()
    rows = hvd.allgather(torch.from_numpy(table), name="hvdkit.digests").numpy()
    return [part for part in np.split(rows, np.cumsum(lengths)[:-1])]


def check_agreement(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """The inside of ``hvdkit.torch.check_agreement``."""
    tensors = {name: tensor.detach() for name, tensor in model_tensors(model).items()}
    if optimizer is not None:
        tensors.update(_optimizer_tensors(optimizer))
    table = agreement.digest_table({_layout(name, tensor): _bytes(tensor) for name, tensor in tensors.items()})
    difference = agreement.first_difference(gather_tables(table))
    if difference is None:
        return
    if not difference.same_names:
        raise agreement.layout_error(difference, [_layout(*item) for item in tensors.items()], hvd.rank())
    name, tensor = list(tensors.items())[difference.position]
    raise agreement.value_error(difference, name, _largest_difference(tensor))


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


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


def _largest_difference(tensor: torch.Tensor) -> float:
    """The largest absolute difference between any rank's values and the root's; a collective."""
    root = tensor.detach().clone().contiguous()
    broadcast_tensors([root], 0)
    mine = math.nan
    if not tensor.is_complex():
        mine = (tensor.double() - root.double()).abs().max().item()
    everyone = hvd.allgather(torch.tensor([mine], dtype=torch.float64), name="hvdkit.difference")
    return float(everyone.max().item())


def average(values: Mapping[str, Any], world: Topology) -> dict[str, float]:
    """The inside of ``hvdkit.torch.average_metrics``."""
    pairs = metrics.sums_and_counts(values)
    metrics.require_same_names(gather_tables(metrics.names_table(pairs)), pairs)
    if not pairs:
        return {}
    totals = hvd.allreduce(torch.tensor(list(pairs.values()), dtype=torch.float64), op=hvd.Sum, name="hvdkit.metrics")
    return metrics.means(pairs, totals.tolist(), world.size)


class EpochBatches(torch.utils.data.Sampler[list[int]]):
    """A batch sampler whose every iteration is the next epoch of a ``Shard``."""

    def __init__(self, share: Shard) -> None:
        self.share = share
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration ``epoch``."""
        if not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgumentError(f"epoch must be an integer >= 0, got {epoch!r}.")
        self.epoch = epoch

    def plan(self) -> Iterator[Batch]:
        """The batches of the next iteration, without advancing to the one after."""
        return self.share.batches(self.epoch)

    def __len__(self) -> int:
        return len(self.share)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.plan()
        self.epoch += 1
        return (batch.indices.tolist() for batch in batches)


def with_weights(batches: Iterable[Any], plan: Iterable[Batch]) -> Iterator[Any]:
    """Append to each batch its per-sample weights, float64 (m,): a float32 cannot hold 6/5."""
    for contents, batch in zip(batches, plan, strict=True):
        weights = torch.full((len(batch.indices),), batch.weight, dtype=torch.float64)
        yield (*contents, weights) if isinstance(contents, (list, tuple)) else (contents, weights)


class ShardedLoader(torch.utils.data.DataLoader[Any]):
    """This rank's part of every global batch; a new order in each iteration. Made by ``hvdkit.torch.shard``."""

    def __init__(self, dataset: torch.utils.data.Dataset[Any], share: Shard, **options: Any) -> None:
        self._batches = EpochBatches(share)
        self._weighted = share.remainder == "exact"
        super().__init__(dataset, batch_sampler=self._batches, **options)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be; each iteration advances it by one."""
        return self._batches.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration ``epoch``: needed only to resume, or to repeat an order."""
        self._batches.set_epoch(epoch)

    def __iter__(self) -> Any:
        plan = self._batches.plan()
        batches = super().__iter__()
        if not self._weighted:
            return batches
        return with_weights(batches, plan)


def load_into(file: Path, target: torch.nn.Module | torch.optim.Optimizer) -> None:
    """Load a state dict into a model or an optimizer.

    Raises:
        CheckpointError: the file cannot be read as plain tensors, or belongs to another model.
    """
    try:
        target.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except (RuntimeError, ValueError, KeyError, OSError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} does not fit this {type(target).__name__}: {reason}") from error


def on_root(action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0 and give every rank its result or its error; a collective."""

    def broadcast(outcome: Any) -> Any:
        return hvd.broadcast_object(outcome, 0, name="hvdkit.on_root")

    return on_root_of(hvd.rank() == 0, action, broadcast)
