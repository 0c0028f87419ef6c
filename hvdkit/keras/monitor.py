"""The run of a Keras training, while it trains; the inside of ``hvdkit.keras.Monitor``."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any

import keras

from hvdkit.core import listeners
from hvdkit.core.communicator import ALLGATHER
from hvdkit.errors import InvalidArgumentError
from hvdkit.keras import private
from hvdkit.keras.data import trained_on
from hvdkit.keras.trainer.callbacks import Callback
from hvdkit.keras.transport import TRANSPORT
from hvdkit.observe import monitor
from hvdkit.steps import torch_tensors
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.keras_layers import common_names


class Monitor(monitor.Monitor, Callback):
    """A callback for ``fit``; in a loop of your own as in PyTorch's (``with``, ``monitor(loader)``, ``log``).

    :class:`hvdkit.observe.monitor.Monitor` says what it takes and raises. It logs what ``fit`` does; with
    ``steps_per_execution`` an execution is so many steps of equal length. Call ``close``, or use ``with``, where the
    process goes on after the training.
    """

    _ranks = TRANSPORT

    def __init__(
        self, directory: str | os.PathLike[str] | None, world: Topology, every: int = 50, *args: Any, **options: Any
    ):
        Callback.__init__(self)
        monitor.Monitor.__init__(self, directory, world, every, *args, **options)
        TRANSPORT.background(ALLGATHER, self._name)  # over MPI a collective of the first thread
        self._last_batch = -1
        if keras.backend.backend() == "tensorflow":
            private.replace(private.TF_ITERATOR, private.saying_when_batches_come)

    def _parameters(self) -> Mapping[str, str]:
        weights = [] if self._model is None else self._model.trainable_weights
        names = common_names(weights) if keras.backend.backend() == "torch" else map(str, range(len(weights)))
        return {name: weight.path for name, weight in zip(names, weights, strict=True)}

    def _device_bytes(self) -> float:
        if keras.backend.backend() == "tensorflow":
            from hvdkit.tensorflow.monitor import device_bytes

            return device_bytes()
        return torch_tensors.device_bytes() if keras.backend.backend() == "torch" else math.nan

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        self._epochs = epochs if self._epochs is None else self._epochs
        if self._steps is None and steps and epochs:
            self._steps = steps * epochs

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        data = trained_on(self.model)
        self.epoch, self._last_batch = epoch, (data.steps_done if data is not None else 0) - 1
        self._samples = float(data.share.batch_size) if hasattr(data, "share") else 0.0
        if self._start is None and self._thread is None:  # by now all callbacks that restore have
            self._start = int(self.model.optimizer.iterations)
        self.asked()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.given()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras, with steps_per_execution for several steps at once."""
        steps, self._last_batch = batch - self._last_batch, batch
        self._window.samples += steps * self._samples
        for name, value in (logs or {}).items():
            with contextlib.suppress(InvalidArgumentError):  # no number, or beyond what a window holds: fit goes on
                self.log(**{name: value})
        self.asked(steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.finished()


def left(model: Any) -> None:
    """A ``fit`` of this model has ended by an error: the step that it was in is none."""
    for one in listeners.MONITORS:
        if isinstance(one, Monitor) and one._model is model:
            one._open = one._iterating = False


def automatic() -> list[Monitor]:
    """The callback of ``hvdkit launch --monitor``, where a ``fit`` has none of its own."""
    found = monitor.automatic()
    return [] if not isinstance(found, Monitor) or found._iterating else [found]
