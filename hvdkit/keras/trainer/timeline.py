"""A callback that records Horovod's timeline of some steps of ``fit``; an inside of ``hvdkit.keras``."""

from __future__ import annotations

import os
from typing import Any

import keras

from hvdkit.errors import InvalidArgumentError
from hvdkit.keras.trainer.callbacks import Callback
from hvdkit.keras.transport import TRANSPORT
from hvdkit.keras.transport.over_horovod import HorovodTransport
from hvdkit.steps.recording import TimelineSteps


class RecordTimeline(Callback):
    """Records the timeline of some steps of ``fit``, on the tensorflow and torch backends; give it to every rank.

    Horovod must run with HOROVOD_TIMELINE=DYNAMIC (``hvdkit launch --env HOROVOD_TIMELINE=DYNAMIC``).

    Args:
        path: of the file to write; rank 0 alone writes it, on its own host.
        steps: batches counted from 0 over all epochs of one ``fit``, like range(100, 120); default: all. With
            ``steps_per_execution`` one execution counts as one.
        mark_cycles: also record the cycles of Horovod's background thread.
    Raises:
        InvalidArgumentError: steps that are not consecutive, or (from ``fit``) Horovod records no timeline.
        DataError: (from ``fit``) the file's directory cannot be written, on rank 0.
    """

    def __init__(self, path: str | os.PathLike[str], steps: range | None = None, *, mark_cycles: bool = False) -> None:
        super().__init__()
        if not isinstance(TRANSPORT, HorovodTransport):
            raise InvalidArgumentError(
                f"a timeline is recorded on the Keras backends tensorflow and torch, got {keras.backend.backend()}; "
                "set HOROVOD_TIMELINE to a file name to record the whole run."
            )
        self._recording = TimelineSteps(TRANSPORT.hvd, path, steps, mark_cycles)

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self._recording.__enter__()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self._recording.step()

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self._recording.__exit__(None, None, None)
