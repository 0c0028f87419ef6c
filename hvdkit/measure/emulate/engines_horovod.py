"""Horovod, on tensors in main memory: through its PyTorch binding, or TensorFlow's where only that is built."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.measure.emulate.check import ALL_TO_ALL, ALLREDUCE, BROADCAST, REDUCE_SCATTER, ROOT, split, storage
from hvdkit.measure.emulate.run_job import ReplayJob
from hvdkit.steps import starting

_ONE_BY_ONE = (
    "Horovod was built for TensorFlow alone, whose tensors are given one by one outside of a graph: nothing was fused, "
    "as with --fusion off."
)


def connect(job: ReplayJob) -> OfTorch | OfTensorFlow:
    """Start Horovod as a training would.

    Raises:
        ImportError: neither binding can be loaded.
    """
    try:
        hvd: Any = importlib.import_module("horovod.torch")
        framework: Any = importlib.import_module("torch")
    except Exception as error:  # a binding that was not built, or that does not load
        return OfTensorFlow(_tensorflow_binding(error), importlib.import_module("tensorflow"), job)
    return OfTorch(hvd, framework, job)


def _tensorflow_binding(first: Exception) -> Any:
    try:
        return importlib.import_module("horovod.tensorflow")
    except Exception as error:
        reasons = "; ".join(str(one).partition("\n")[0] for one in (first, error))
        raise ImportError(f"Horovod cannot be loaded: {reasons}") from error


class _Horovod:
    """What both bindings have; see ``engines.Engine``."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        world = starting.start(hvd, os.environ)
        self.rank = world.rank
        self.size = world.size
        self.notes: tuple[str, ...] = ()

    def barrier(self) -> None:
        self._hvd.barrier()

    def close(self) -> None:
        self._hvd.shutdown()


class OfTorch(_Horovod):
    """Horovod's PyTorch binding: with fusion all tensors of a step are given before the first is waited for."""

    def __init__(self, hvd: Any, torch: Any, job: ReplayJob) -> None:
        super().__init__(hvd)
        self._torch = torch
        self.overlaps = job.asked.fusion

    def operation(self, index: int, collective: str, elements: int, dtype: str) -> HorovodOperation:
        return HorovodOperation(self._hvd, self._torch, f"hvdkit.emulate.{index}", collective, elements, dtype)


class HorovodOperation:
    """One tensor under one name, which Horovod knows again in the next trial; see ``engines.EngineOperation``."""

    def __init__(self, hvd: Any, torch: Any, name: str, collective: str, elements: int, dtype: str) -> None:
        self._hvd, self._name, self._collective = hvd, name, collective
        self._array = np.empty(elements, storage(dtype))
        self._tensor = torch.from_numpy(self._array)
        self._splits = torch.tensor(split(elements, hvd.size()), dtype=torch.int32)
        self._handle: Any = None
        self._output = self._tensor

    def load(self, values: NDArray[Any]) -> None:
        self._array[:] = values

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
        self._output = output[0] if self._collective == ALL_TO_ALL and isinstance(output, tuple) else output

    def result(self) -> NDArray[Any]:
        return np.asarray(self._output.numpy())


class OfTensorFlow(_Horovod):
    """Horovod's TensorFlow binding, eagerly: one tensor after the other."""

    overlaps = False

    def __init__(self, hvd: Any, tensorflow: Any, job: ReplayJob) -> None:
        super().__init__(hvd)
        self._tensorflow = tensorflow
        self.notes = (_ONE_BY_ONE,) if job.asked.fusion else ()

    def barrier(self) -> None:
        """See ``engines.Engine``; this binding has no barrier, and nobody leaves an allreduce before all have come."""
        self._hvd.allreduce(self._tensorflow.constant(0), op=self._hvd.Sum, name="hvdkit.emulate.barrier")

    def operation(self, index: int, collective: str, elements: int, dtype: str) -> TensorFlowOperation:  # noqa: ARG002
        return TensorFlowOperation(self._hvd, self._tensorflow, f"hvdkit.emulate.{index}", collective, elements)


class TensorFlowOperation:
    """One tensor under one name; see ``engines.EngineOperation``."""

    def __init__(self, hvd: Any, tensorflow: Any, name: str, collective: str, elements: int) -> None:
        self._hvd, self._tensorflow, self._name, self._collective = hvd, tensorflow, name, collective
        self._splits = tensorflow.constant(split(elements, hvd.size()), dtype=tensorflow.int32)
        self._input: Any = None
        self._output: Any = None

    def load(self, values: NDArray[Any]) -> None:
        self._input = self._tensorflow.constant(values)

    def start(self) -> None:
        """Nothing: the operations block."""

    def finish(self) -> None:
        hvd = self._hvd
        if self._collective == ALLREDUCE:
            self._output = hvd.allreduce(self._input, op=hvd.Sum, name=self._name)
        elif self._collective == REDUCE_SCATTER:
            own = hvd.reducescatter(self._input, op=hvd.Sum, name=self._name)
            self._output = hvd.allgather(own, name=f"{self._name}.gather")
        elif self._collective == BROADCAST:
            self._output = hvd.broadcast(self._input, ROOT, name=self._name)
        else:
            output = hvd.alltoall(self._input, self._splits, name=self._name)
            self._output = output[0] if isinstance(output, tuple | list) else output

    def result(self) -> NDArray[Any]:
        return np.asarray(self._output.numpy())
