"""Horovod, on tensors in main memory: through its PyTorch binding, or TensorFlow's where only that is built."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.measure.emulate.check import ALL_TO_ALL, ALLREDUCE, BROADCAST, REDUCE_SCATTER, ROOT, split, storage
from hvdkit.measure.emulate.engines import Engine, EngineOperation
from hvdkit.measure.emulate.run_job import ReplayJob
from hvdkit.steps import starting

_ONE_BY_ONE = (
    "Horovod was built for TensorFlow alone, whose tensors are given one by one outside of a graph: nothing was fused, "
    "as with --fusion off."
)


def connect(job: ReplayJob) -> Engine:
    """Start Horovod as a training would.

    With PyTorch's binding and fusion all tensors of a step are given before the first is waited for; TensorFlow's works
    eagerly, one tensor after the other.

    Raises:
        ImportError: neither binding can be loaded.
    """
    kind: type[HorovodOperation | TensorFlowOperation] = HorovodOperation
    try:
        hvd: Any = importlib.import_module("horovod.torch")
        framework: Any = importlib.import_module("torch")
    except Exception as error:  # a binding that was not built, or that does not load
        kind, hvd, framework = TensorFlowOperation, _tensorflow_binding(error), importlib.import_module("tensorflow")
    world = starting.start(hvd, os.environ)

    def operation(index: int, collective: str, elements: int, dtype: str) -> EngineOperation:
        return kind(hvd, framework, f"hvdkit.emulate.{index}", collective, elements, dtype)

    if kind is HorovodOperation:
        return Engine(world.rank, world.size, operation, hvd.barrier, hvd.shutdown, job.asked.fusion)

    def barrier() -> None:
        """That binding has none, and nobody leaves an allreduce before all have come."""
        hvd.allreduce(framework.constant(0), op=hvd.Sum, name="hvdkit.emulate.barrier")

    notes = (_ONE_BY_ONE,) if job.asked.fusion else ()
    return Engine(world.rank, world.size, operation, barrier, hvd.shutdown, notes=notes)


def _tensorflow_binding(first: Exception) -> Any:
    try:
        return importlib.import_module("horovod.tensorflow")
    except Exception as error:
        reasons = "; ".join(str(one).partition("\n")[0] for one in (first, error))
        raise ImportError(f"Horovod cannot be loaded: {reasons}") from error


class HorovodOperation(EngineOperation):
    """One of PyTorch's tensors under one name, which Horovod knows again in the next trial."""

    def __init__(self, hvd: Any, torch: Any, name: str, collective: str, elements: int, dtype: str) -> None:
        super().__init__(np.empty(elements, storage(dtype)))
        self._hvd, self._name, self._collective = hvd, name, collective
        self._tensor = torch.from_numpy(self.given)
        self._splits = torch.tensor(split(elements, hvd.size()), dtype=torch.int32)
        self._handle: Any = None

    def start(self) -> None:
        hvd = self._hvd
        if self._collective == ALLREDUCE:
            self._handle = hvd.allreduce_async_(self._tensor, op=hvd.Sum, name=self._name)
        elif self._collective == REDUCE_SCATTER:
            self._handle = hvd.reducescatter_async(self._tensor, name=self._name, op=hvd.Sum)
        elif self._collective == BROADCAST:
            self._handle = hvd.broadcast_async_(self._tensor, ROOT, name=self._name)
        else:
            self._handle = hvd.alltoall_async(self._tensor, self._splits, name=self._name)

    def finish(self) -> None:
        output = self._hvd.synchronize(self._handle)
        if self._collective == REDUCE_SCATTER:
            output = self._hvd.synchronize(self._hvd.allgather_async(output, name=f"{self._name}.gather"))
        self.got = output[0] if self._collective == ALL_TO_ALL and isinstance(output, tuple) else output


class TensorFlowOperation(EngineOperation):
    """One of TensorFlow's tensors under one name; it blocks."""

    def __init__(self, hvd: Any, tensorflow: Any, name: str, collective: str, elements: int, _dtype: str) -> None:
        super().__init__(None)
        self._hvd, self._tensorflow, self._name, self._collective = hvd, tensorflow, name, collective
        self._splits = tensorflow.constant(split(elements, hvd.size()), dtype=tensorflow.int32)

    def load(self, values: NDArray[Any]) -> None:
        self.given = self._tensorflow.constant(values)

    def finish(self) -> None:
        hvd = self._hvd
        if self._collective == ALLREDUCE:
            self.got = hvd.allreduce(self.given, op=hvd.Sum, name=self._name)
        elif self._collective == REDUCE_SCATTER:
            own = hvd.reducescatter(self.given, op=hvd.Sum, name=self._name)
            self.got = hvd.allgather(own, name=f"{self._name}.gather")
        elif self._collective == BROADCAST:
            self.got = hvd.broadcast(self.given, ROOT, name=self._name)
        else:
            output = hvd.alltoall(self.given, self._splits, name=self._name)
            self.got = output[0] if isinstance(output, tuple | list) else output
