"""torch.distributed: Gloo on tensors in main memory, NCCL on GPUs."""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import InvalidArgumentError, LauncherError
from hvdkit.measure.emulate.check import ALL_TO_ALL, ALLREDUCE, BROADCAST, REDUCE_SCATTER, ROOT, split, storage
from hvdkit.measure.emulate.engines import Engine, EngineOperation
from hvdkit.measure.emulate.run_job import ReplayJob
from hvdkit.steps import bootstrap, device, launchers

_WAIT_S = 120.0


def connect(job: ReplayJob) -> Engine:
    """Meet the other ranks at a file of the job's folder, and start ``torch.distributed``.

    Raises:
        LauncherError: the launcher's environment does not say the rank.
        InvalidArgumentError: NCCL is asked for, and PyTorch sees no GPU for this rank.
    """
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    launched = launchers.detect(os.environ)
    if launched is None and job.asked.ranks > 1:
        raise LauncherError(f"No launcher known here started this rank; known are {', '.join(launchers.KNOWN)}.")
    rank = launched.rank if launched is not None else 0
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = job.asked.backend or ("nccl" if visible else "gloo")
    if backend == "nccl":
        if not visible:
            raise InvalidArgumentError("NCCL needs a GPU for each rank, and PyTorch sees none; use --engine gloo.")
        local_rank = launched.local_rank if launched is not None and launched.local_rank is not None else rank
        torch.cuda.set_device(device.device_index(local_rank, visible))
    store = distributed.FileStore(str(job.folder / "store"), job.asked.ranks)
    store.set_timeout(timedelta(seconds=_WAIT_S))
    if backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = _interface(store, rank, job.asked.ranks)
    wait = timedelta(seconds=_WAIT_S)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=job.asked.ranks, timeout=wait)
    place, notes = "cuda" if backend == "nccl" else "cpu", (f"torch.distributed used {backend}.",)

    def operation(_index: int, *what: Any) -> EngineOperation:
        return TorchOperation(torch, distributed, place, *what)

    barrier, close = distributed.barrier, distributed.destroy_process_group
    return Engine(rank, job.asked.ranks, operation, barrier, close, notes=notes)


def _interface(store: Any, rank: int, size: int) -> str:
    """The network interface on which this rank reaches the others: Gloo's own guess is that of the host's name."""
    store.set(f"host{rank}", socket.gethostname())
    names = [store.get(f"host{other}").decode() for other in range(size)]
    elsewhere = next((name for name in names if name != names[rank]), None)
    if elsewhere is None:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((elsewhere, 9))  # sends nothing; the kernel chooses the way
        return bootstrap.interface_of(probe.getsockname()[0])


class TorchOperation(EngineOperation):
    """One tensor; it blocks. A reduce-scatter has equal parts, the last one filled up with 0."""

    def __init__(self, torch: Any, distributed: Any, place: str, collective: str, elements: int, dtype: str) -> None:
        self._torch, self._distributed, self._place = torch, distributed, place
        self._collective, self._elements = collective, elements
        self._bfloat16 = dtype == "bfloat16"
        size, rank = distributed.get_world_size(), distributed.get_rank()
        self._shares = split(elements, size)
        padded = -(-elements // size) * size if collective == REDUCE_SCATTER else elements
        super().__init__(self._as_tensor(np.zeros(padded, storage(dtype))))
        self._own = self.given[: padded // size].clone()
        if collective == REDUCE_SCATTER:
            self.got = self.given.clone()
        elif collective == ALL_TO_ALL:
            self.got = self._as_tensor(np.zeros(self._shares[rank] * size, storage(dtype)))

    def load(self, values: NDArray[Any]) -> None:
        self.given[: self._elements] = self._as_tensor(values)
        self._wait()

    def finish(self) -> None:
        distributed = self._distributed
        if self._collective == ALLREDUCE:
            distributed.all_reduce(self.given)
        elif self._collective == REDUCE_SCATTER:
            distributed.reduce_scatter_tensor(self._own, self.given)
            distributed.all_gather_into_tensor(self.got, self._own)
        elif self._collective == BROADCAST:
            distributed.broadcast(self.given, ROOT)
        else:
            received = [self._shares[distributed.get_rank()]] * len(self._shares)
            distributed.all_to_all_single(self.got, self.given, received, self._shares)
        self._wait()

    def result(self) -> NDArray[Any]:
        output = self.got.cpu()
        if self._bfloat16:
            output = output.view(self._torch.int16)
        array = np.asarray(output.numpy()[: None if self._collective == ALL_TO_ALL else self._elements])
        return array.view(np.uint16) if self._bfloat16 else array

    def _as_tensor(self, array: NDArray[Any]) -> Any:
        tensor = self._torch.from_numpy(array.view(np.int16) if self._bfloat16 else array)
        return (tensor.view(self._torch.bfloat16) if self._bfloat16 else tensor).to(self._place)

    def _wait(self) -> None:
        if self._place == "cuda":
            self._torch.cuda.synchronize()
