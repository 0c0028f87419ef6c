"""hvdkit inside the libraries that have a training loop of their own: accelerate, transformers, Lightning."""

from __future__ import annotations

import hvdkit.torch as hk
from hvdkit.steps import starting


def started() -> hk.Topology:
    """This job: what the program's own ``init`` has started, else what ``init`` starts now."""
    import horovod.torch as hvd  # after hvdkit.torch, which says what is missing

    return starting.of(hvd, "none") if hvd.is_initialized() else hk.init()
