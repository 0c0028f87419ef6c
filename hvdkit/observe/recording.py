"""Horovod's timeline of some steps only, instead of the whole run."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from hvdkit.errors import DataError, InvalidArgumentError

_FIX = "start the job with: hvdkit launch --env HOROVOD_TIMELINE=DYNAMIC"


class TimelineSteps:
    """Records the timeline of some of the training steps; a context manager around the training loop.

    ::

        with record_timeline("timeline.json", steps=range(100, 120)) as recording:
            for batch in loader:
                train(batch)
                recording.step()

    Every rank does the same; rank 0 alone writes the file, on its own host. Horovod must have been started with
    HOROVOD_TIMELINE=DYNAMIC: ``hvdkit launch --env HOROVOD_TIMELINE=DYNAMIC``.

    Args:
        horovod: ``horovod.torch`` or ``horovod.tensorflow``, initialised.
        path: of the file to write.
        steps: consecutive steps counted from 0 at the start of the block, like range(100, 120); default: all.
        mark_cycles: also record the cycles of Horovod's background thread.
    Attributes:
        recording: whether this step is recorded.
    Raises:
        InvalidArgumentError: steps that are not consecutive, start below 0 or are none.
    Source: Horovod 0.28.1, horovod/common/basics.py, start_timeline and stop_timeline.
    """

    def __init__(
        self, horovod: Any, path: str | os.PathLike[str], steps: range | None = None, mark_cycles: bool = False
    ) -> None:
        if steps is not None and (not isinstance(steps, range) or steps.step != 1 or not 0 <= steps.start < steps.stop):
            raise InvalidArgumentError(
                f"steps must be consecutive steps counted from 0, such as range(100, 120), got {steps!r}."
            )
        self._horovod, self._path, self._steps, self._mark_cycles = horovod, Path(path).absolute(), steps, mark_cycles
        self._done, self.recording, self._recorded = 0, False, False

    def __enter__(self) -> TimelineSteps:
        """Start to count, and to record where that starts at step 0.

        Raises:
            InvalidArgumentError: Horovod runs without HOROVOD_TIMELINE=DYNAMIC, or was not initialised.
            DataError: the file's directory cannot be written, on rank 0.
        """
        self._done, self._recorded = 0, False
        setting = os.environ.get("HOROVOD_TIMELINE")
        if setting != "DYNAMIC":  # found out before the training, not at the first step to record
            received = "it is not set" if setting is None else f"it is {setting!r}, by which the whole run is recorded"
            raise InvalidArgumentError(
                f"to record some steps Horovod must be started with HOROVOD_TIMELINE=DYNAMIC, but {received}; {_FIX} "
                "(and without --timeline)."
            )
        rank = self._horovod.rank()
        if rank == 0 and (self._path.is_dir() or not os.access(self._path.parent, os.W_OK)):
            raise DataError(
                f"the timeline cannot be written to {str(self._path)!r} on rank 0; give a file in a directory that "
                "exists and can be written."
            )
        if self._steps is None or self._steps.start == 0:
            self._start()
        return self

    def step(self) -> None:
        """Say that a step is complete: call it on every rank after each optimizer step."""
        self._done += 1
        if self._steps is None:
            return
        if self.recording and self._done >= self._steps.stop:
            self._stop()
        elif self._done == self._steps.start:
            self._start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop to record, also after an error; the file is complete up to here."""
        if self.recording:
            self._stop()
        if kind is None and not self._recorded:
            warnings.warn(
                f"no timeline was recorded: the training took {self._done} steps, and the steps to record were "
                f"{self._steps}; call step() after every step, or choose earlier ones.",
                stacklevel=2,
            )

    def _start(self) -> None:
        try:
            self._horovod.start_timeline(str(self._path), mark_cycles=self._mark_cycles)
        except ValueError as error:
            raise InvalidArgumentError(
                f"Horovod records no timeline ({error}) HOROVOD_TIMELINE=DYNAMIC must be set before init(): {_FIX}."
            ) from error
        self.recording = self._recorded = True

    def _stop(self) -> None:
        self.recording = False
        self._horovod.stop_timeline()
