"""Do the ranks still hold the same variables? Looked at now and then where gradients are averaged, in eager steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.steps import agreement, parting
from hvdkit.tensorflow.names import canonical_name, native

_FIRST = 8
"""Of the exchanges that are compared: Horovod's recipes broadcast after a step, which may exchange more than once."""
_COUNTS: dict[str, int] = {}
_ROUNDINGS = {tf.float64: 2**-52, tf.float32: 2**-23, tf.float16: 2**-10, tf.bfloat16: 2**-7}


def forget() -> None:
    """Ranks have joined, or Horovod has started anew with others: all begin to count."""
    _COUNTS.clear()


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it takes seconds, to no end
def look(variables: Iterable[Any], process_set: Any) -> None:
    """Called with every exchange of the variables' gradients, before it; a collective at the 8th, 16th and so on.

    Not within ``tf.function``: a branch with a collective there would cost every step some microseconds for each
    variable, and its name would depend on the rest of the rank's graph.

    Args:
        variables: whose gradients are exchanged; what is no variable of floating type is left out.
        process_set: Horovod's set of ranks that exchange.
    Raises:
        AgreementError: on every rank: their variables differ.
    """
    if not tf.executing_eagerly() or not process_set.included():
        return
    named = [(canonical_name(one), native(one)) for one in variables]
    named = [(name, one) for name, one in named if isinstance(one, tf.Variable) and one.dtype.is_floating]
    if not named:
        return
    names, ours = zip(*named, strict=True)
    # Ranks outside a process set count for themselves what they exchange of variables with the same names.
    call = f"hvdkit.parameters.{process_set.process_set_id}.{agreement.digest(np.array(names)) & 0xFFFFFFFF:08x}"
    _COUNTS[call] = count = _COUNTS.get(call, 0) + 1
    if count >= _FIRST and parting.is_due(count):
        mine = np.array([fact for one in ours for fact in _facts(one)])
        sent = np.concatenate([np.ones(3), mine, mine**2])
        whole = hvd.allreduce(tf.constant(sent), op=hvd.Sum, name=call, process_set=process_set)
        parting.judge(whole.numpy(), names, [_ROUNDINGS.get(one.dtype, 1.0) for one in ours], count)


def _facts(variable: Any) -> tuple[float, float]:
    """Of a variable its norm, and a sum of that size."""
    value = variable.value()
    wide = value if value.dtype in (tf.float32, tf.float64) else tf.cast(value, tf.float32)
    norm = float(2 * tf.cast(tf.nn.l2_loss(wide), tf.float64)) ** 0.5
    return norm, float(tf.reduce_sum(wide)) / max(int(tf.size(wide)), 1) ** 0.5
