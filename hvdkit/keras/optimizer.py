"""The optimizer of ``hvdkit.keras.distribute``: the one of both adapters, over this backend's transport."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.common import keras_optimizer
from hvdkit.errors import InvalidArgumentError
from hvdkit.keras import state
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps.gradients import GradientOptions


def distribute(optimizer: Any, options: GradientOptions, process_set: Any) -> Any:
    """See ``hvdkit.keras.distribute``."""
    keras_optimizer.require_keras_3(optimizer, keras.optimizers.Optimizer, "distribute")
    state.world()
    if options.op == "adasum":
        raise InvalidArgumentError("op='adasum' combines whole updates, which Keras does not expose; use op='average'.")
    reduce, ranks = TRANSPORT.reducer(options, process_set)
    return keras_optimizer.distribute_optimizer(optimizer, options, reduce, ranks)
