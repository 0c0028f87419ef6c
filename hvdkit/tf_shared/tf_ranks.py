"""Between the ranks of a TensorFlow process, which hvdkit.tensorflow and Keras' tensorflow backend have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.core.communicator import BACKGROUND_POLL_S, Array, OverHorovod
from hvdkit.core.layout import in_buckets
from hvdkit.steps.shard_state import MESSAGE_BYTES

IN_ANY_GRAPH: dict[str, bool] = {}
"""Options of Horovod's operations: none, or where state is divided (``shard_state``) that scopes are no part of names.

TensorFlow numbers the scopes of loops and branches by what else is in a graph, and there each rank has another graph.
"""


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


def share(tensors: list[Any], owners: list[int], name: str) -> list[Any]:
    """What the owners have of flat tensors, each of the same length and type on all ranks; a collective.

    Eagerly, too, in a graph: there operations have names, and travel side by side.
    """
    if not tf.executing_eagerly():
        return _broadcast(tensors, owners, name)
    received: list[Any] = _sharing(name, tuple(owners))(tensors)
    return received


@lru_cache(maxsize=1024)
def _sharing(name: str, owners: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    function: Callable[[list[Any]], list[Any]] = tf.function(
        lambda tensors: _broadcast(tensors, owners, name), autograph=False
    )
    return function


def _broadcast(tensors: Sequence[Any], owners: Sequence[int], name: str) -> list[Any]:
    received = list(tensors)
    kinds = list(zip(owners, (tensor.dtype for tensor in tensors), strict=True))
    buckets = in_buckets(kinds, [tensor.shape[0] * tensor.dtype.size for tensor in tensors], MESSAGE_BYTES)
    for number, bucket in enumerate(buckets):
        parts = [tensors[place] for place in bucket]
        message = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        bits = tf.bitcast(message, tf.uint16) if message.dtype == tf.bfloat16 else message  # which Horovod may not know
        got = hvd.broadcast(bits, root_rank=owners[bucket[0]], name=f"{name}.{number}", ignore_name_scope=True)
        got = tf.bitcast(got, message.dtype) if bits is not message else got
        for place, part in zip(bucket, tf.split(got, [one.shape[0] for one in parts]), strict=True):
            received[place] = part
    return received
