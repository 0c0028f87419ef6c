"""One GPU, or its share of the cores, for a TensorFlow process; the inside of ``hvdkit.tensorflow.pin_device``."""

from __future__ import annotations

import os
import warnings

import tensorflow as tf

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import device
from hvdkit.steps.topology import Topology


def pin(world: Topology, kind: str, threads: int | None) -> str:
    """See ``hvdkit.tensorflow.pin_device``."""
    device.require_wish(kind, threads)
    visible = tf.config.list_physical_devices("GPU")
    device.require_gpu(kind, len(visible), "TensorFlow")
    pinned = []
    if visible and kind != "cpu":
        pinned = [visible[device.device_index(world.local_rank, len(visible))]]
    place = "/GPU:0" if pinned else "/CPU:0"
    try:
        tf.config.set_visible_devices(pinned, "GPU")
        for gpu in pinned:
            tf.config.experimental.set_memory_growth(gpu, True)
        if threads is not None:
            _set_threads(threads)
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"TensorFlow has started with other settings ({error}); call pin_device right after init(), before the "
            "first tensor, variable or model."
        ) from error
    if threads is not None or tf.config.threading.get_intra_op_parallelism_threads() > 0:
        return place
    try:
        _set_threads(device.threads_asked(os.environ) or device.cpu_threads_here(world.local_size))
    except RuntimeError:
        warnings.warn(
            "TensorFlow has started already and keeps a thread for every core, on every rank of this host; call "
            "pin_device right after init(), before the first tensor, variable or model.",
            RuntimeWarning,
            stacklevel=3,
        )
    return place


def _set_threads(threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
