"""The user's callbacks that write files: on the root alone, with their effects on all ranks; an inside of ``fit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.callbacks import BackupAndRestore, CSVLogger, ModelCheckpoint, RemoteMonitor, TensorBoard

from hvdkit.keras import state
from hvdkit.keras.trainer.callbacks import broadcast_state
from hvdkit.keras.transport import TRANSPORT

WRITERS = (BackupAndRestore, CSVLogger, ModelCheckpoint, RemoteMonitor, TensorBoard)
"""Keras' own; a subclass of the user's writes, too."""

_AGREED = ("set_model", "on_train_begin", "on_epoch_end", "on_train_end")
"""Where an error waits until ``Effects``, which comes last, tells all ranks; elsewhere it is raised at once."""


def on_the_root(callbacks: Any) -> list[Any]:
    """A list of callbacks, which may be nested, as a rank uses it: only the root writes, and ``Effects`` come last."""
    flat = keras.tree.flatten(callbacks or [])
    effects = Effects([one for one in flat if isinstance(one, WRITERS)])
    if state.world().is_root:
        mine = [_Writer(one, effects) if isinstance(one, WRITERS) else one for one in flat]
    else:
        mine = [one for one in flat if not isinstance(one, WRITERS)]
    return [*mine, effects]


class Effects(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives every rank what the root's writers did: their error, restored weights, the epoch to begin with, the best.

    It is there on all ranks, since a writer may be in the root's list alone.

    Args:
        writers: of this rank, in their order; on other ranks than the root Keras never calls them.
    """

    def __init__(self, writers: list[Any]) -> None:
        super().__init__()
        self._restore = any(isinstance(one, BackupAndRestore) for one in writers)
        self._checkpoints = [one for one in writers if isinstance(one, ModelCheckpoint)]
        self._error: Exception | None = None

    def holding(self, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook of a writer whose error waits for the other ranks."""

        def held(*args: Any, **kwargs: Any) -> None:
            try:
                hook(*args, **kwargs)
            except Exception as error:
                self._error = self._error or error

        return held

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        model = self.model
        epoch = self._of_root(lambda: model._initial_epoch if self._restore else None)
        if epoch is not None:
            broadcast_state(model, model.optimizer, 0)
            model._initial_epoch = epoch  # as BackupAndRestore sets it

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        mine = [None if one.best is None else state.number(one.best) for one in self._checkpoints]
        for checkpoint, best in zip(self._checkpoints, self._of_root(lambda: mine), strict=False):
            checkpoint.best = best

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        self._of_root(lambda: None)

    def _of_root(self, facts: Callable[[], Any]) -> Any:
        def action() -> Any:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return facts()

        return TRANSPORT.on_root(action)


class _Writer(keras.callbacks.Callback):  # type: ignore[misc]
    """Stands in the root's list for a writer, whose methods it has; those it lacks stay marked as Keras' empty ones."""

    def __init__(self, writer: Any, effects: Effects) -> None:
        super().__init__()
        for name in (*(name for name in dir(writer) if name.startswith("on_")), "set_model", "set_params"):
            hook = getattr(writer, name)
            setattr(self, name, effects.holding(hook) if name in _AGREED else hook)
