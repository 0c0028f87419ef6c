"""Do the ranks still hold the same variables? Looked at now and then where gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.steps import agreement, parting
from hvdkit.tensorflow.names import canonical_name, native

_FIRST = 8
"""Of the exchanges that are compared: Horovod's recipes broadcast after a step, which may exchange more than once."""
_IN_GRAPHS = 4
"""So many variables, the largest, are looked at in ``tf.function``, where each costs every step some microseconds."""
_COUNTS: dict[str, int] = {}
_GRAPH_COUNTS: dict[str, tf.Variable] = {}
_ROUNDINGS = {tf.float64: 2**-52, tf.float32: 2**-23, tf.float16: 2**-10, tf.bfloat16: 2**-7}


def forget() -> None:
    """Ranks have joined, or Horovod has started anew with others: all begin to count."""
    _COUNTS.clear()
    for count in _GRAPH_COUNTS.values():
        count.assign(0)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it takes seconds, to no end
def look(variables: Iterable[Any], process_set: Any) -> None:
    """Called with every exchange of the variables' gradients, before it; a collective at the 8th, 16th and so on.

    Args:
        variables: whose gradients are exchanged; what is no variable of floating type is left out.
        process_set: Horovod's set of ranks that exchange.
    Raises:
        AgreementError: on every rank: their variables differ. In ``tf.function`` TensorFlow raises an error of its
            own with these words.
    """
    named = [(canonical_name(one), native(one)) for one in variables]
    named = [(name, one) for name, one in named if isinstance(one, tf.Variable) and one.dtype.is_floating]
    if not named or not process_set.included() or process_set.size() < 2:
        return
    graph = not tf.executing_eagerly()
    if graph:
        named = sorted(named, key=lambda pair: -(pair[1].shape.num_elements() or 0))[:_IN_GRAPHS]
    names, ours = zip(*named, strict=True)
    # Ranks outside a process set count for themselves what they exchange of variables with the same names.
    call = f"hvdkit.parameters.{process_set.process_set_id}.{agreement.digest(np.array(names)) & 0xFFFFFFFF:08x}"
    if graph:
        count = _count(call)
        tf.cond(
            (count >= _FIRST) & parting.is_due(count),
            lambda: _compare(ours, names, count, f"{call}.graph", process_set),
            lambda: False,
        )
        return
    _COUNTS[call] = steps = _COUNTS.get(call, 0) + 1
    if steps >= _FIRST and parting.is_due(steps):
        _compare(ours, names, tf.constant(steps), call, process_set)


def _count(call: str) -> Any:
    with tf.init_scope():
        if call not in _GRAPH_COUNTS:
            with tf.device("/CPU:0"):
                _GRAPH_COUNTS[call] = tf.Variable(0, trainable=False, dtype=tf.int64)
    return _GRAPH_COUNTS[call].assign_add(1)


def _compare(ours: Sequence[tf.Variable], names: Sequence[str], count: Any, call: str, process_set: Any) -> Any:
    mine = tf.reshape([fact for one in ours for fact in _facts(one)], [-1])
    sent = tf.concat([tf.ones(3, tf.float64), mine, mine**2], 0)
    # Without the scopes of the graph around it, which may be another on another rank.
    whole = hvd.allreduce(sent, op=hvd.Sum, name=call, process_set=process_set, ignore_name_scope=True)

    def judge(seen: Any, steps: Any) -> Any:
        parting.judge(np.asarray(seen), names, [_ROUNDINGS.get(one.dtype, 1.0) for one in ours], int(steps))
        return np.True_

    return judge(whole, count) if tf.executing_eagerly() else tf.numpy_function(judge, [whole, count], tf.bool)


def _facts(variable: tf.Variable) -> tuple[Any, Any]:
    """Of a variable its norm, and a sum of that size, float64 () each."""
    value = variable.value()
    wide = value if value.dtype in (tf.float32, tf.float64) else tf.cast(value, tf.float32)
    size = tf.cast(tf.maximum(tf.size(wide), 1), tf.float64)
    norm = tf.sqrt(2 * tf.cast(tf.nn.l2_loss(wide), tf.float64))
    return norm, tf.cast(tf.reduce_sum(wide), tf.float64) / tf.sqrt(size)
