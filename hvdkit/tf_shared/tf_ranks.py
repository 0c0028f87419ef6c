"""Between the ranks of a TensorFlow process, which hvdkit.tensorflow and Keras' tensorflow backend have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.core.communicator import BACKGROUND_POLL_S, Array, OverHorovod


class TensorflowRanks(OverHorovod):
    """Over ``horovod.tensorflow``."""

    def __init__(self) -> None:
        super().__init__(hvd, tf.constant)

    def background(
        self,
        collective: str,
        name: str,
        poll_s: float = BACKGROUND_POLL_S,  # noqa: ARG002 - TensorFlow's thread sleeps
        **options: Any,
    ) -> Callable[[Array], Array]:
        """In a graph: outside of one TensorFlow gives all of Horovod's operations one name, by which threads meet.

        A concrete function is a graph under ``tf.config.run_functions_eagerly``, too.
        """
        graphs: list[Callable[[Any], Any]] = []

        def run(array: Array) -> Array:
            with tf.device("/CPU:0"):
                if not graphs:
                    call = tf.function(self.call(collective, name, **options), autograph=False)
                    shape = tf.TensorSpec([None] * array.ndim, tf.as_dtype(array.dtype))
                    graphs.append(call.get_concrete_function(shape))
                received: Array = graphs[0](tf.constant(array)).numpy()
            return received

        return run
