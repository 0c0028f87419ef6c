"""PyTorch's Horovod imported where TensorFlow's is at work; ranks reach each other over the first that was started."""

from __future__ import annotations

import sys
from typing import Any

import horovod.torch as hvd
from horovod.common import process_sets

from hvdkit.errors import InvalidArgumentError


def _at_work() -> Any:
    """``horovod.tensorflow`` where it has been started; None where not."""
    module = sys.modules.get("horovod.tensorflow")
    return module if module is not None and module.is_initialized() else None


def refuse() -> None:
    """Raise InvalidArgumentError where the ranks are connected for TensorFlow, and not for PyTorch."""
    if not hvd.is_initialized() and _at_work() is not None:
        raise InvalidArgumentError(
            "shard of hvdkit.torch was called where hvdkit.tensorflow, or hvdkit.keras on its tensorflow backend, has "
            "connected the ranks; give that one's shard arrays or a tf.data.Dataset, or set KERAS_BACKEND=torch."
        )


# Horovod's process sets are those of the framework that was imported last, and TensorFlow's is at work.
if (_connected := _at_work()) is not None:
    process_sets._setup(_connected.mpi_ops._basics)
