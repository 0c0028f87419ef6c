"""The run of a TensorFlow training, while it trains; the inside of ``hvdkit.tensorflow.Monitor``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdkit.observe import monitor
from hvdkit.tensorflow.optimizer import SHOWN
from hvdkit.tensorflow.state import RANKS


class Monitor(monitor.Monitor):
    """Watches a loop while it trains; :class:`hvdkit.observe.monitor.Monitor` says what it takes and raises."""

    _ranks = RANKS

    def _held(self, value: Any) -> Any:
        # What a GPU still computes is not waited for now.
        if not isinstance(value, tf.Tensor) or "GPU" not in value.device:
            return float(value)
        if value.shape.num_elements() != 1:
            raise ValueError(f"a tensor of the shape {value.shape}")
        return value

    def _parameters(self) -> Mapping[str, str]:
        return SHOWN

    def _device_bytes(self) -> float:
        return device_bytes()

    def ready(self) -> None:
        """This rank's gradients are there; where nobody says when a batch is asked for, that is once in a step."""
        if self.automatic and not self._iterating:
            self.stepped()
        else:
            super().ready()


def device_bytes() -> float:
    """Memory of the first GPU that TensorFlow uses; NaN without one."""
    if not tf.config.list_logical_devices("GPU"):
        return math.nan
    return float(tf.config.experimental.get_memory_info("GPU:0")["current"])
