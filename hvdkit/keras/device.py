"""One accelerator, or a share of the CPU cores, for a Keras 3 process; the inside of ``hvdkit.keras.pin_device``."""

from __future__ import annotations

import os

import keras

from hvdkit.steps import device
from hvdkit.steps.topology import Topology


def pin(world: Topology, kind: str, threads: int | None) -> str:
    """See ``hvdkit.keras.pin_device``."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from hvdkit import tensorflow

        return tensorflow.pin_device(world, kind, threads).strip("/").lower()
    device.require_wish(kind, threads)
    share = threads or device.threads_asked(os.environ) or device.cpu_threads_here(world.local_size)
    return _pin_torch(world, kind, share) if backend == "torch" else _pin_jax(world, kind, share)


def _pin_torch(world: Topology, kind: str, threads: int) -> str:
    import torch

    torch.set_num_threads(threads)
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        return _without_gpu(kind, "torch")
    if kind == "cpu":
        keras.device("cpu").__enter__()  # Keras would take the GPU; for the rest of the process
        return "cpu:0"
    index = device.device_index(world.local_rank, visible)
    torch.cuda.set_device(index)
    return f"gpu:{index}"


def _pin_jax(world: Topology, kind: str, threads: int) -> str:
    import jax

    os.environ["PJRT_NPROC"] = str(threads)  # XLA reads it when it makes its thread pools, at JAX's first operation
    if kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return "cpu:0"
    # Without starting JAX, which would take the memory of all of them.
    present = len(device.visible_gpus(os.environ))
    if present:
        jax.config.update("jax_cuda_visible_devices", str(device.device_index(world.local_rank, present)))
    mine = jax.local_devices()
    if mine[0].platform == "cpu":
        return _without_gpu(kind, "jax")
    # More than one where JAX had started before: it has taken the memory of all of them, but uses one.
    index = device.device_index(world.local_rank, len(mine))
    jax.config.update("jax_default_device", mine[index])
    return f"gpu:{index}"


def _without_gpu(kind: str, backend: str) -> str:
    device.require_gpu(kind, 0, f"the {backend} backend")
    return "cpu:0"
