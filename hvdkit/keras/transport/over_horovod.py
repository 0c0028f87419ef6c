"""Keras' tensorflow and torch backends over the Horovod of the same framework; one inside of ``hvdkit.keras``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.core.communicator import OverHorovod
from hvdkit.errors import InvalidArgumentError
from hvdkit.keras.transport.interface import Ranks, Transport
from hvdkit.steps import passes, starting, step_times, torch_tensors
from hvdkit.steps.gradients import GradientOptions, obstacle_of_type
from hvdkit.steps.launchers import is_elastic
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.keras_optimizer import Reduce

Array = npt.NDArray[Any]

_SENT = ("float16", "float32", "float64")  # what every Horovod adds up
_reductions = count()


def naming() -> Callable[[], str]:
    """A name for one ``distribute``'s gradients, so that those of two optimizers never meet.

    Drawn when it is first used: a ``distribute`` on one rank alone must not shift the names of those that train.
    """
    return functools.cache(lambda: f"hvdkit.gradients.{next(_reductions)}")


class HorovodTransport(OverHorovod, Transport):
    """What does not depend on the framework."""

    def start_library(self) -> Topology:
        return starting.start(self.hvd, os.environ)

    def has_background(self) -> bool:
        # Horovod Elastic has its own way to go on without a rank that fails.
        return self.size() > 1 and not is_elastic()

    def before_shutdown(self, action: Callable[[], None]) -> None:
        if hasattr(self.hvd.shutdown, "hvdkit_plain"):
            return
        plain = self.hvd.shutdown

        def shutdown() -> None:
            action()
            plain()

        shutdown.hvdkit_plain = plain  # type: ignore[attr-defined]
        self.hvd.shutdown = shutdown

    def shutdown(self) -> None:
        """Horovod's own: ranks that fail, or that start anew, stay guarded."""
        getattr(self.hvd.shutdown, "hvdkit_plain", self.hvd.shutdown)()

    def end(self, why: str) -> None:  # noqa: ARG002
        self.shutdown()

    def ranks(self, process_set: Any) -> Ranks:
        """The ranks that a gradient of this process is combined over; a rank outside the set is alone."""
        if process_set is None:
            return None
        if process_set.process_set_id is None:
            raise InvalidArgumentError(
                "Horovod does not know this process set yet; give it to horovod's init(process_sets=[...]), or "
                "add_process_set, before distribute."
            )
        return tuple(process_set.ranks) if process_set.included() else (self.hvd.rank(),)


class OverTensorflow(HorovodTransport):
    """The transport of the tensorflow backend."""

    def __init__(self, hvd: Any) -> None:
        import tensorflow as tf

        from hvdkit.tf_shared.tf_ranks import TensorflowRanks

        super().__init__(hvd, tf.constant)
        self.background = TensorflowRanks().background  # type: ignore[method-assign]

    def digests(self, variables: Sequence[Any]) -> npt.NDArray[np.int64]:
        from hvdkit.tensorflow import agreement

        return agreement.digests(variables)

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        import tensorflow as tf

        from hvdkit.tensorflow import optimizer, private

        among = self.hvd.global_process_set if process_set is None else process_set
        private.mark()
        optimizer.expect_steps()
        reduction, ranks = optimizer.Reduction(options, 1, True, among), self.ranks(process_set)

        def reduce(gradients: list[Any], variables: list[Any]) -> list[Any]:
            # Dense even on one rank: Keras' adaptive optimizers square each row of IndexedSlices before they add those
            # of the same index, so that a training on one process would differ from the same on two.
            dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
            if is_alone(ranks, self.hvd.size()):
                optimizer.steps().count()
                if os.environ.get(step_times.VARIABLE):
                    present = [one for one in dense if one is not None]
                    optimizer.say_ready(present, ["optimizer"] * len(present))
                return dense
            return optimizer.reduce_once(dense, variables, reduction)

        return reduce, ranks


class OverTorch(HorovodTransport):
    """The transport of the torch backend."""

    def __init__(self, hvd: Any) -> None:
        import torch

        super().__init__(hvd, torch.from_numpy)

    def digests(self, variables: Sequence[Any]) -> npt.NDArray[np.int64]:
        return torch_tensors.digests([variable.value.detach() for variable in variables])

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        from hvdkit.keras.transport.torch_hooks import TorchGradients

        passes.expect_steps()
        among = self.hvd.global_process_set if process_set is None else process_set
        ranks = self.ranks(process_set)
        return TorchGradients(self, options, among), ranks

    def sends_bfloat16(self, device: str, process_set: Any) -> bool:
        """Whether gradients in bfloat16 on a device ("cpu", "cuda") are summed as they are."""
        among = self.hvd.global_process_set if process_set is None else process_set
        return torch_tensors.sends_bfloat16(device, among.size())

    def scaling(self, options: GradientOptions, process_set: Any) -> dict[str, Any]:
        """What Horovod's allreduce is told of the options."""
        among = self.hvd.global_process_set if process_set is None else process_set
        factor = options.gradient_predivide_factor
        share = 1 / (among.size() if among.included() else 1) if options.op == "average" else 1.0
        return {
            "op": self.hvd.Sum,
            "prescale_factor": 1 / factor,
            "postscale_factor": factor * share,
            "process_set": among,
        }


def is_alone(ranks: Ranks, size: int) -> bool:
    """Whether gradients are combined over this process only; in an elastic training that may change at any time."""
    if ranks is None:
        return size == 1 and not is_elastic()
    return len(ranks) == 1


def by_sent_type(types: Sequence[str], options: GradientOptions, bfloat16: bool) -> dict[str, list[int]]:
    """Positions by the type in which they travel, ``bfloat16`` as itself or not; one operation takes one type.

    Raises:
        InvalidArgumentError: a type that is too narrow for a mean.
    """
    groups: dict[str, list[int]] = {}
    sent = (*_SENT, "bfloat16") if bfloat16 else _SENT
    for position, own in enumerate(types):
        if obstacle := obstacle_of_type(own):
            raise InvalidArgumentError(f"gradient {position + 1} of {len(types)} cannot travel: {obstacle}")
        sent_as = "float16" if options.compression == "fp16" else own if own in sent else "float32"
        groups.setdefault(sent_as, []).append(position)
    return groups
