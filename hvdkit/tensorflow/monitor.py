"""The run of a TensorFlow training, while it trains; the inside of ``hvdkit.tensorflow.Monitor``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.observe import monitor
from hvdkit.tensorflow.optimizer import SHOWN


class Monitor(monitor.Monitor):
    """Watches a loop while it trains; ``hvdkit.observe.monitor.Monitor`` says what it is given and what it raises."""

    def _gather(self, words: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        return background_allgather(words, name)

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


def background_allgather(words: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
    """Every rank's words, int64 (size, n), in a second thread, whatever the first one waits for; a collective."""
    with tf.device("/CPU:0"):
        everyone: npt.NDArray[np.int64] = _gathering(name)(tf.constant(words[None])).numpy()
    return everyone


@functools.cache
def _gathering(name: str) -> Callable[[Any], Any]:
    """Outside of a graph an operation has no name of its own, and would be taken for one of the first thread.

    A concrete function is a graph under ``tf.config.run_functions_eagerly``, too.
    """
    function = tf.function(lambda words: hvd.allgather(words, name=name), autograph=False)
    graph: Callable[[Any], Any] = function.get_concrete_function(tf.TensorSpec((1, None), tf.int64))
    return graph
