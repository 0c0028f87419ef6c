"""Callbacks for Keras' ``fit`` that keep and share its state; an inside of ``hvdkit.keras``."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.common.keras_optimizer import require_keras_3
from hvdkit.errors import InvalidArgumentError
from hvdkit.keras import seeds, state
from hvdkit.keras.optimizer import meant_by


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that says so when it meets a model of Keras 2."""

    def set_model(self, model: Any) -> None:
        """Called by Keras."""
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
        """Called by Keras."""
        broadcast_state(self.model, self.model.optimizer, self._root)


def broadcast_state(model: Any, optimizer: Any | None, root: int) -> None:
    """The inside of ``hvdkit.keras.broadcast_state``."""
    world = state.world()
    if not 0 <= root < world.size:
        raise InvalidArgumentError(f"root must be a rank in 0 .. {world.size - 1}, got {root}.")
    variables = state.model_variables(model)
    optimizers = meant_by(optimizer, model)
    if world.size > 1:
        state.make_slots_of(root, optimizers, model)
    variables += state.optimizer_variables(optimizers, model)
    if world.size > 1:
        variables += state.beside_keras(model)
        state.require_same_layout(variables, optimizers)
        state.broadcast(variables, root)
    seeds.move_to_own_stream(model)
