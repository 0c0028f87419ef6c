"""Callbacks for Keras' ``fit``: hvdkit's share its state or record its steps, the user's write on the root alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
from keras.callbacks import BackupAndRestore, CSVLogger, ModelCheckpoint, RemoteMonitor, TensorBoard

from hvdkit.errors import InvalidArgumentError
from hvdkit.keras import private, seeds, state
from hvdkit.keras.optimizer import meant_by
from hvdkit.keras.transport import TRANSPORT, HorovodTransport
from hvdkit.observe.recording import TimelineSteps
from hvdkit.observe.step_files import Recorder, recorder
from hvdkit.steps import agreement
from hvdkit.steps.outer import end_windows
from hvdkit.tf_shared.keras_optimizer import distributed_rows, make_slots, require_keras_3, trained_variables


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback, whose ``on_...`` are called by Keras, that says so when it meets a model of Keras 2."""

    def set_model(self, model: Any) -> None:
        require_keras_3(model, keras.Model, type(self).__name__)
        super().set_model(model)


class BroadcastState(Callback):
    """Gives every rank the root's weights and state of the model's optimizers before the first step (step 5).

    Args:
        root: rank to copy from.
    Raises:
        InvalidArgumentError: (from ``fit``) the model is not built, and cannot be from the first batch's shapes.
        AgreementError: (from ``fit``) the ranks' models differ in layers, shapes or types.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self._root = root

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        broadcast_state(self.model, self.model.optimizer, self._root)


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
        if self._recorder is not None:
            self._recorder.asked()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        if self._recorder is not None:
            self._recorder.given()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        if self._recorder is not None:
            self._recorder.asked()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        if self._recorder is not None:
            self._recorder.finished()


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
        self._recording.__enter__()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._recording.step()

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        self._recording.__exit__(None)


def broadcast_state(model: Any, optimizer: Any | None, root: int = 0) -> None:
    """The inside of ``hvdkit.keras.broadcast_state``."""
    world = state.world()
    if not 0 <= root < world.size:
        raise InvalidArgumentError(f"root must be a rank in 0 .. {world.size - 1}, got {root}.")
    end_windows()
    variables = state.model_variables(model)
    optimizers = meant_by(optimizer, model)
    if world.size > 1 and len(optimizers) > 1:
        mine = trained_variables(optimizers, model.weights)
        make_slots(optimizers, model.weights, TRANSPORT.allgather(mine, "hvdkit.trained")[root])
    variables += state.optimizer_variables(optimizers, model)
    if world.size > 1:
        if keras.backend.backend() == "tensorflow":
            from hvdkit.tensorflow.state import beside_keras  # loads TensorFlow

            variables += beside_keras(model)
        agreement.require_same_rows(TRANSPORT, [*map(state.layout, variables), *distributed_rows(optimizers)])
        TRANSPORT.broadcast_variables(variables, state.value_of, root)
    seeds.move_to_own_stream(model)


# The user's that write files: on the root, with their effects on all ranks --------------------------------------------

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
        epoch = self._of_root(lambda: private.first_epoch_of(model) if self._restore else None)
        if epoch is not None:
            broadcast_state(model, model.optimizer, 0)
            private.set_first_epoch(model, epoch)  # as BackupAndRestore does

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
