"""``accelerate.Accelerator`` with hvdkit's gradients: ``Accelerator`` from here, the rest of the program stays.

Data, ``gather_for_metrics``, checkpoints and mixed precision stay accelerate's own, over ``torch.distributed``. What
changes is who averages gradients: models are not wrapped in DistributedDataParallel, whose average would be a second
one, and each optimizer is ``distribute``\\ d.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import horovod.torch as hvd
import torch

import hvdkit.torch as hk
from hvdkit.errors import InvalidArgumentError, TopologyMismatchError, of_extra
from hvdkit.integrations import started

with of_extra("transformers", "hvdkit.integrations.accelerate needs accelerate"):
    import accelerate
    from accelerate.utils import DistributedType

_SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


def init() -> hk.Topology:
    """Start Horovod and ``torch.distributed``, and let accelerate know of the job, under any launcher (step 1).

    Call it before ``TrainingArguments``, which asks how many processes there are. ``Accelerator`` calls it itself.

    Raises:
        LauncherError: the launcher's environment is incomplete, or the ranks do not find each other.
        TopologyMismatchError: the launcher and Horovod disagree about rank or size.
    """
    world = started()
    if world.size > 1:
        told = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.local_rank}
        for name, value in (told | {"LOCAL_WORLD_SIZE": world.local_size}).items():
            os.environ.setdefault(name, str(value))
        if not torch.cuda.is_available():  # else accelerate takes each process for a job of one
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        if not torch.distributed.is_initialized():
            hk.init_process_group()
    return world


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate's, whose gradients are hvdkit's: the mean over all ranks when ``backward`` returns.

    ``prepare`` gives every rank the root's parameters and optimizer state. Within ``accumulate`` and ``no_sync``
    gradients stay this rank's own until the last backward, as with DistributedDataParallel.

    Args:
        arguments: of ``accelerate.Accelerator``.
    Raises:
        InvalidArgumentError: DeepSpeed, FSDP or Megatron is asked for.
        TopologyMismatchError: accelerate sees other ranks than Horovod.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        init()
        super().__init__(*arguments, **named)
        self._begin()

    @classmethod
    def of(cls, made: Any) -> Accelerator:
        """Have an ``accelerate.Accelerator`` that a library has made exchange its gradients over Horovod.

        Raises:
            InvalidArgumentError, TopologyMismatchError: as above.
        """
        made.__class__ = cls
        made._begin()
        return made  # type: ignore[no-any-return]

    def _begin(self) -> None:
        if self.distributed_type in _SHARDED:
            raise InvalidArgumentError(
                f"this Accelerator shards the model ({self.distributed_type.value}), and hvdkit averages the gradients "
                "of whole models; leave out that plugin, or take accelerate's own Accelerator."
            )
        if (self.process_index, self.num_processes) != (hvd.rank(), hvd.size()):
            raise TopologyMismatchError(
                f"accelerate sees process {self.process_index} of {self.num_processes}, Horovod rank {hvd.rank()} of "
                f"{hvd.size()}; call hvdkit.integrations.accelerate.init() before TrainingArguments or another "
                "Accelerator, and on a machine with GPUs let both use them, or neither."
            )
        self._distributed: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, and the models that they train

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:  # noqa: ARG002
        """accelerate's, without DistributedDataParallel; ``prepare`` calls it, too."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        self._distribute()
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """accelerate's; its gradients are averaged over the ranks as soon as its models are prepared, too."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        self._distribute()
        return prepared

    def _distribute(self) -> None:
        for optimizer in self._apart():
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            owned = {id(model): {id(parameter) for parameter in model.parameters()} for model in self._models}
            models = [model for model in self._models if owned[id(model)] & held]
            if held <= set().union(*owned.values()):
                model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
                hk.distribute(optimizer, model)
                hk.broadcast_state(model, optimizer)
                self._distributed.update((optimizer, *models))

    def _apart(self) -> list[Any]:
        return [wrapper.optimizer for wrapper in self._optimizers if wrapper.optimizer not in self._distributed]

    def backward(self, loss: Any, **named: Any) -> None:
        """accelerate's, after which ``.grad`` is the mean over all ranks.

        Raises:
            InvalidArgumentError: an optimizer was prepared without its models.
        """
        if apart := self._apart():
            raise InvalidArgumentError(
                f"{type(apart[0]).__name__} was prepared and holds parameters of no prepared model, so that each rank "
                "would train its own; give accelerator.prepare the models, and make a lone tensor part of one."
            )
        super().backward(loss, **named)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Backwards in here keep their gradients on this rank; the first one after it averages their sum."""
        with hk.no_sync(model) if model in self._distributed else nullcontext():
            yield
