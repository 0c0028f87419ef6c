"""``Trainer(strategy=HorovodStrategy())``: Lightning's Trainer over Horovod, the strategy that Lightning 2 left out.

It needs no ``torch.distributed``, and no ``devices`` or ``num_nodes``: the launcher says how many processes there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import horovod.torch as hvd
import torch

import hvdkit.torch as hk
from hvdkit.errors import InvalidArgumentError, of_extra
from hvdkit.integrations import started

with of_extra("lightning", "hvdkit.integrations.lightning needs lightning"):
    from lightning.pytorch.strategies import ParallelStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

_OPS = {"mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


class HorovodStrategy(ParallelStrategy):  # type: ignore[misc]
    """Gradients are the mean over all ranks when ``backward`` returns, in automatic and manual optimization.

    ``toggle_model(sync_grad=False)`` and ``accumulate_grad_batches`` keep gradients on their rank until the last
    backward. The root writes checkpoints; before training and testing every rank gets the root's weights.

    Args:
        options: of ``hvdkit.torch.distribute``, for each optimizer: ``compression``, ``bucket_mb``, ...
    Raises:
        InvalidArgumentError: op="adasum", which replaces the optimizer that Lightning's schedulers hold.
    """

    strategy_name = "horovod"
    is_distributed = True
    """Lightning asks for it before it gives samplers each rank's part."""

    def __init__(self, **options: Any) -> None:
        if options.get("op") == "adasum":
            raise InvalidArgumentError(
                'HorovodStrategy got op="adasum", which would replace the optimizers that schedulers hold; leave op '
                'out, or take "sum".'
            )
        super().__init__()
        self._options = options
        self.world = started()
        rank_zero_only.rank = self.world.rank

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its host."""
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        """Its host among all hosts."""
        return self.world.cross_rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.world.size

    @property
    def root_device(self) -> torch.device:
        """The CPU, or the GPU of this process: Lightning's ``devices``, of which every process sees all or its own."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]  # type: ignore[no-any-return]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What Lightning makes ``DistributedSampler`` with."""
        return {"num_replicas": self.world.size, "rank": self.world.rank}

    def setup(self, trainer: Any) -> None:
        """As every strategy's; then each optimizer is distributed, and all ranks get the root's weights."""
        super().setup(trainer)
        module = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING:
            for optimizer in self.optimizers:
                hk.distribute(optimizer, module, **self._options)
        hk.broadcast_state(module)

    def model_to_device(self) -> None:
        """Move the module to this process's device."""
        self.model.to(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards in here keep their gradients on this rank; the first one after it averages their sum."""
        with hk.no_sync(self.lightning_module) if self.optimizers else nullcontext():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor's mean, sum, ... over all ranks; what is no tensor stays.

        Raises:
            InvalidArgumentError: a process group of ``torch.distributed``, or an operation that Horovod has not.
        """
        _require_no_group(group)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()  # torch.distributed's ReduceOp, or a word
        if name not in _OPS:
            raise InvalidArgumentError(f"reduce_op must be one of {', '.join(_OPS)}, got {reduce_op!r}.")
        value = tensor if tensor.is_floating_point() or name not in ("mean", "avg") else tensor.float()
        return hvd.allreduce(value, op=_OPS[name], name="hvdkit.lightning.reduce")

    def barrier(self, name: str | None = None) -> None:  # noqa: ARG002
        """Wait for all ranks."""
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Any object of one rank, for all."""
        return hvd.broadcast_object(obj, src, name="hvdkit.lightning.broadcast")

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """(ranks, ...) of tensors of one shape; with ``sync_grads`` a rank's gets the sum of all ranks' gradients."""
        _require_no_group(group)
        if self.world.size == 1:  # as Lightning's own strategies
            return tensor
        with nullcontext() if sync_grads else torch.no_grad():
            return hk.gather(tensor.unsqueeze(0))

    def teardown(self) -> None:
        """As every strategy's; no process group is left."""
        Strategy.teardown(self)


def _require_no_group(group: Any) -> None:
    if group not in (None, torch.distributed.group.WORLD):
        raise InvalidArgumentError(f"HorovodStrategy reduces over all ranks, got group={group!r}; leave it out.")


StrategyRegistry.register("horovod", HorovodStrategy, description="Gradients over Horovod, by hvdkit")
