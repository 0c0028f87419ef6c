"""One GPU, or its share of the cores, for a process whose framework is not known (step 2)."""

from __future__ import annotations

import importlib.util
import os

from hvdkit.steps import device
from hvdkit.steps.topology import Topology

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def pin_device(world: Topology, kind: str = "auto", threads: int | None = None) -> str:
    """Give this process one GPU, or its share of the CPU cores (step 2); before the framework looks for devices.

    A GPU is chosen by CUDA_VISIBLE_DEVICES, threads by OMP_NUM_THREADS and its like, for what is loaded from now on.

    Args:
        world: the job; ``local_rank`` and ``local_size`` are used.
        kind: "auto" (a GPU where one is visible), "gpu" or "cpu".
        threads: compute threads; default: OMP_NUM_THREADS, else the usable cores divided by the ranks here.
    Returns:
        "cuda:0", the only GPU that is visible from now on, or "cpu".
    Raises:
        InvalidArgumentError: an unknown kind, threads < 1, or "gpu" where none is visible.
        LauncherError: more processes on this host than GPUs.
    """
    device.require_wish(kind, threads)
    gpus = device.visible_gpus(os.environ)
    device.require_gpu(kind, len(gpus), "this process", "nvidia-smi")
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        count = device.cpu_threads_here(world.local_size) if threads is None else threads
        os.environ.update(dict.fromkeys(_THREADS, str(count)))
        if importlib.util.find_spec("threadpoolctl") is not None:  # also for libraries that are loaded already
            importlib.import_module("threadpoolctl").threadpool_limits(count)
    if not gpus or kind == "cpu":
        return "cpu"
    chosen = device.device_index(world.local_rank, len(gpus))
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[chosen]
    return "cuda:0"
