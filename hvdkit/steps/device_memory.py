"""Memory of the accelerator that this process uses, by framework; bytes, NaN without one.

A framework is imported by who asks for it alone: hvdkit.keras trains on two, and stands on one of their adapters.
"""

from __future__ import annotations

import math


def of_torch() -> float:
    """Of all devices: which one is pinned is known to the first thread alone."""
    import torch

    if not torch.cuda.is_available():
        return math.nan
    return float(sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))))


def of_tensorflow() -> float:
    """Of the first GPU that TensorFlow uses."""
    import tensorflow as tf

    if not tf.config.list_logical_devices("GPU"):
        return math.nan
    return float(tf.config.experimental.get_memory_info("GPU:0")["current"])
