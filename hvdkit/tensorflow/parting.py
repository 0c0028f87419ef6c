"""Do the ranks still hold the same variables? Looked at now and then where gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.steps import agreement, parting
from hvdkit.tensorflow.names import canonical_name, native

_COUNTS: dict[str, Any] = {}
_ROUNDINGS = {tf.float64: 2**-52, tf.float32: 2**-23, tf.float16: 2**-10, tf.bfloat16: 2**-7}


def forget() -> None:
    """Horovod has started anew with other ranks, which begin to count."""
    for count in _COUNTS.values():
        count.assign(0)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it takes seconds, to no end
def look(variables: Iterable[Any], process_set: Any) -> None:
    """Called with every exchange of the variables' gradients, before it; a collective now and then.

    Not at the first: Horovod's recipes broadcast after the first step.

    Args:
        variables: whose gradients are exchanged; what is no variable of floating type is left out.
        process_set: Horovod's set of ranks that exchange.
    Raises:
        AgreementError: on every rank: their variables differ. In ``tf.function`` TensorFlow raises an error of its
            own with these words.
    """
    named = [(canonical_name(one), native(one)) for one in variables]
    named = [(name, one) for name, one in named if isinstance(one, tf.Variable) and one.dtype.is_floating]
    if not named or not process_set.included():
        return
    names, ours = zip(*named, strict=True)
    call = f"hvdkit.parameters.{agreement.digest(np.array(names)) & 0xFFFFFFFF:08x}"
    roundings = [_ROUNDINGS.get(one.dtype, 1.0) for one in ours]

    def compare() -> Any:
        mine = tf.reshape([fact for one in ours for fact in _facts(one)], [-1])
        sent = tf.concat([tf.ones(2, tf.float64), mine, mine**2], 0)
        whole = hvd.allreduce(sent, op=hvd.Sum, name=call, process_set=process_set)

        def judge(seen: Any) -> Any:
            parting.judge(np.asarray(seen), names, roundings)
            return seen[0]

        return judge(whole) if tf.executing_eagerly() else tf.numpy_function(judge, [whole], tf.float64)

    with tf.init_scope():
        if call not in _COUNTS:
            with tf.device("/CPU:0"):
                _COUNTS[call] = tf.Variable(0, trainable=False, dtype=tf.int64)
    count = _COUNTS[call].assign_add(1)
    if not tf.executing_eagerly():
        tf.cond(parting.is_due(count) & (count > 1), compare, lambda: tf.zeros((), tf.float64))
    elif int(count) > 1 and parting.is_due(int(count)):
        compare()


def _facts(variable: Any) -> tuple[Any, Any]:
    """Of a variable its norm, and a sum of that size, float64 () each."""
    value = variable.value()
    wide = value if value.dtype in (tf.float32, tf.float64) else tf.cast(value, tf.float32)
    size = tf.cast(tf.maximum(tf.size(wide), 1), tf.float64)
    return (
        tf.sqrt(2 * tf.cast(tf.nn.l2_loss(wide), tf.float64)),
        tf.cast(tf.reduce_sum(wide), tf.float64) / tf.sqrt(size),
    )
