"""One GPU, or its share of the cores, for a process whose framework is not known; the inside of ``hvdkit.arrays``."""

from __future__ import annotations

import importlib.util
from collections.abc import MutableMapping

from hvdkit.steps import device
from hvdkit.steps.topology import Topology

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def pin(world: Topology, kind: str, threads: int | None, environ: MutableMapping[str, str]) -> str:
    """See ``hvdkit.arrays.pin_device``."""
    device.require_wish(kind, threads)
    gpus = device.visible_gpus(environ)
    device.require_gpu(kind, len(gpus), "this process", "nvidia-smi")
    _set_threads(threads, world, environ)
    if not gpus or kind == "cpu":
        return "cpu"
    chosen = device.device_index(world.local_rank, len(gpus))
    environ["CUDA_VISIBLE_DEVICES"] = gpus[chosen]
    return "cuda:0"


def _set_threads(threads: int | None, world: Topology, environ: MutableMapping[str, str]) -> None:
    """For libraries that are loaded from now on; where threadpoolctl is installed, also for those that are."""
    if threads is None and "OMP_NUM_THREADS" in environ:
        return
    count = device.cpu_threads_here(world.local_size) if threads is None else threads
    environ.update(dict.fromkeys(_THREADS, str(count)))
    if importlib.util.find_spec("threadpoolctl") is not None:
        importlib.import_module("threadpoolctl").threadpool_limits(count)
