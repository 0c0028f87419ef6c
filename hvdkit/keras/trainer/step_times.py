"""A callback that records when every step of ``fit`` begins and ends; an inside of ``hvdkit.keras``."""

from __future__ import annotations

from typing import Any

from hvdkit.keras.trainer.callbacks import Callback
from hvdkit.steps.step_times import Recorder, recorder


class RecordSteps(Callback):
    """Has ``hvdkit bench`` see when every step of ``fit`` begins and ends; give it to every rank.

    Does nothing unless HVDKIT_STEP_TIMES names a directory to write to. The time from one step's end to the next
    one's begin counts as input; on the tensorflow backend the batch is taken inside of the step. With
    ``steps_per_execution`` one execution counts as one step. On a GPU, times are those of the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorder: Recorder | None = recorder()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if self._recorder is not None:
            self._recorder.asked()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if self._recorder is not None:
            self._recorder.given()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if self._recorder is not None:
            self._recorder.asked()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if self._recorder is not None:
            self._recorder.finished()
