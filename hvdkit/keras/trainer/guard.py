"""What keeps every ``fit`` of a job synchronised; the inside of ``hvdkit.keras.init``.

Horovod cannot know that an optimizer was not distributed, and Keras has no hook that every ``fit`` passes. So ``init``
replaces ``keras.Model.fit`` by one that averages the logs of each epoch before any callback of the user's sees them
(metrics.py), lets callbacks that write do so on the root (writers.py), and adds a callback that checks

- before training: the optimizer is distributed; epochs, and steps per epoch, are equal on all ranks;
- before and after the first step, and after the last: weights and optimizer state are bit-identical on all ranks;
- at each epoch: no rank stops alone or uses another learning rate.

Every failure is one error, raised on all ranks that are still there to raise it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from hvdkit.common.keras_optimizer import is_distributed, move_to_loss_scale, require_keras_3, taking_part
from hvdkit.errors import AgreementError, InvalidArgumentError
from hvdkit.keras import agreement as keras_agreement
from hvdkit.keras import state
from hvdkit.keras.data import ShardedData, set_trained_on
from hvdkit.keras.trainer import private
from hvdkit.keras.trainer.metrics import AverageOfFit, States
from hvdkit.keras.trainer.writers import on_the_root
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps import agreement
from hvdkit.steps.ranks import name_ranks

_UNKNOWN, _ENDED = -1, -2


def install() -> None:
    """Guard ``keras.Model.fit`` in this process, once, and where Keras 2 (tf_keras) is in use its ``fit`` too."""
    legacy = "tf_keras" in sys.modules or os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if legacy and importlib.util.find_spec("tf_keras") is not None:
        private.replace(private.LEGACY_FIT, _refusing)
    private.replace(private.FIT, _guarded)
    private.replace(private.REST, private.go_on_in_mid_epoch)


def _guarded(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    def fit(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        model, data = call.arguments["self"], call.arguments["x"]
        guard = Guard(call.arguments)
        if state.world().size > 1:
            _prepare(model)
            _refuse_what_undoes_weights(model, call.arguments["x"])
            if not state.world().is_root:
                call.arguments["verbose"] = 0
        if isinstance(data, ShardedData):
            call.arguments["shuffle"] = False  # it draws the same order on all ranks; Keras would draw one on each
            call.arguments["x"] = guard.reader
        set_trained_on(model, data if isinstance(data, ShardedData) else None)
        call.arguments["callbacks"] = _with_guard(guard, call.arguments["callbacks"])
        try:
            history = plain(*call.args, **call.kwargs)
            guard.check(model, "at the end")
        except Exception as error:
            _say_that_another_rank_is_gone(error)
            raise
        finally:
            set_trained_on(model, None)
        return history

    return fit


def _refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        by_horovod = type(getattr(self, "optimizer", None)).__module__.startswith("horovod")
        if state.world().size > 1 and not by_horovod:
            require_keras_3(self, keras.Model, "fit")
        return plain(self, *args, **kwargs)

    return fit


def _prepare(model: Any) -> None:
    """Refuse or adapt what cannot be trained on several ranks as it is."""
    if not model.compiled:
        return  # Keras says so itself
    attributes = keras.tree.flatten([value for value in vars(model).values() if not isinstance(value, dict)])
    optimizers = [value for value in attributes if isinstance(value, keras.optimizers.Optimizer)]
    for optimizer in optimizers:
        move_to_loss_scale(optimizer)
    # A model with a train_step of its own may use other optimizers than the one that compile made.
    if optimizers and not any(map(is_distributed, optimizers)):
        world = state.world()
        raise InvalidArgumentError(
            f"fit was called on rank {world.rank} of {world.size} with an optimizer ({type(model.optimizer).__name__}) "
            "that hvdkit has not distributed: every process would train a model of its own; compile the model with "
            "hvdkit.keras.distribute(optimizer)."
        )
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        warnings.warn(
            "hvdkit trains without jit_compile: Horovod's allreduce has no XLA kernel in TensorFlow. Results are the "
            "same; compile the model with jit_compile=False to say so yourself.",
            stacklevel=3,
        )
        model.jit_compile = False
        model.train_function = None


def _refuse_what_undoes_weights(model: Any, data: Any) -> None:
    """Refuse losses that are no mean over the global batch, and say where Keras does not do what it is asked."""
    if isinstance(data, ShardedData) and data.share.remainder == "exact" and model.compiled:
        reductions = [getattr(loss, "reduction", None) for loss in keras.tree.flatten(model.loss)]
        wrong = [one for one in reductions if one in ("sum", "mean_with_sample_weight")]
        if wrong:
            raise InvalidArgumentError(
                f"fit got data with remainder='exact' and a loss with reduction={wrong[0]!r}, which undoes the weights "
                "that make the mean over the ranks exact; make the loss with reduction='sum_over_batch_size', or shard "
                "with remainder='drop'."
            )
    if any(getattr(layer, "synchronized", False) for layer in model._flatten_layers()):
        _warn_of_synchronized()


@functools.cache
def _warn_of_synchronized() -> None:
    warnings.warn(
        "BatchNormalization(synchronized=True) synchronises within a tf.distribute strategy, not over Horovod's ranks: "
        "each rank normalises by its own part of the batch.",
        stacklevel=4,
    )


def _say_that_another_rank_is_gone(error: Exception) -> None:
    """Horovod's error for a collective that has lost a rank, in a sentence; elastic training waits for this type."""
    if "Horovod has been shut down" not in str(error):
        return
    from horovod.common.exceptions import HorovodInternalError

    raise HorovodInternalError(
        f"rank {state.world().rank} cannot go on, Horovod has been shut down: another rank has failed or ended "
        "while this one still trained; the first error in the other ranks' output says why."
    ) from error


def _with_guard(guard: Guard, callbacks: Any) -> Any:
    """The callbacks of one ``fit``: the guard, on several ranks the means of the logs, the user's, what they share."""
    own = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    world = state.world()
    if world.size > 1:
        whole = [guard, AverageOfFit(world), *on_the_root(own)]
    else:
        whole = [guard, *keras.tree.flatten(own or [])]
    if own is callbacks:
        return whole
    return keras.callbacks.CallbackList(whole, model=callbacks.model, **(callbacks.params or {}))


class Guard(keras.callbacks.Callback):  # type: ignore[misc]
    """The checks of one ``fit``; the first of its callbacks.

    Args:
        arguments: of ``fit``.
    """

    async_safe = True  # on_train_batch_end only counts

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        data = arguments["x"]
        self._data = data if isinstance(data, ShardedData) else None
        self.reader = self._data.reader() if self._data is not None else None
        validates = arguments["validation_data"] is not None or arguments["validation_split"]
        when = np.frombuffer(repr(arguments["validation_freq"]).encode(), dtype=np.uint8)
        self._validation = agreement.digest(when) if validates else _UNKNOWN
        self._all_validate = False
        self._alone = state.world().size == 1
        self._begun = self._stepped = False
        self._first_batch, self._last_batch = 0, -1
        self._forget_filler: Callable[[], None] | None = None

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if self._alone:
            return
        facts = {"steps per epoch": self.params.get("steps") or _UNKNOWN, "epochs": self.params["epochs"]}
        mine = np.array([[*facts.values(), self._validation]], dtype=np.int64)
        everyone = np.stack(TRANSPORT.gather(mine, "hvdkit.fit"))[:, 0]
        for name, values in zip(facts, everyone.T.tolist(), strict=False):
            _require_same(name, values)
        self._all_validate = bool((everyone[:, 2] == self._validation).all()) and self._validation != _UNKNOWN

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self._first_batch = 0
        if not self._begun and self._data is not None and self.reader is not None:
            if epoch > self._data.epoch:  # a resumed training goes on with its own epoch's order
                self._data.set_epoch(epoch)
            self.reader.go_to(self._data)
            self._first_batch = self._data.steps_done
        if not self._alone:
            self._meet(epoch)
            if not self._begun and self.model.built:
                variables = state.model_variables(self.model)
                self._check(variables, "before the first step")
        self._begun = True
        self._last_batch = self._first_batch - 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if batch > self._first_batch:
            self._check_first_step()
        if self._data is not None and self._data.ends_with_filler and batch == len(self._data) - 1:
            self._forget_filler = _remember(self.model) if batch > self._first_batch else self.model.reset_metrics

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if self._data is not None:
            self._data.advance(min(batch, self.params["steps"] - 1) - self._last_batch)
        self._last_batch = max(self._last_batch, batch)

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras before a validation."""
        self._without_filler()
        if self._all_validate:
            self._average_statistics()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if self._alone:
            return
        self._without_filler()
        taken, expected = self._last_batch + 1, self.params["steps"]
        if taken < expected and not self.model.stop_training:
            raise InvalidArgumentError(
                f"the data of rank {state.world().rank} ended after {taken} of {expected} steps in epoch "
                f"{epoch + 1}, and the other ranks wait for it; give every rank the same number of batches (shard)."
            )
        self._check_first_step()
        self._average_statistics()

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        if not self._alone:
            self._meet(_ENDED)

    def _without_filler(self) -> None:
        """Take the filler, of weight 0, out of the epoch's metrics, of which Keras counts it in most."""
        forget, self._forget_filler = self._forget_filler, None
        if forget is not None:
            _ = self.model  # on jax this brings the variables up to date
            forget()

    def check(self, model: Any, when: str) -> None:
        """Weights that are trained, and the optimizer's state, are the same on all ranks."""
        if not self._alone:
            self.set_model(model)
            self._check(model.trainable_variables, when)

    def _check_first_step(self) -> None:
        if not self._stepped and not self._alone:
            self._stepped = True
            self._check(self.model.trainable_variables, "after the first step")

    def _check(self, variables: list[Any], when: str) -> None:
        optimizer = self.model.optimizer
        slots = list(optimizer.variables) if optimizer is not None else []
        try:
            keras_agreement.compare([*variables, *slots], ranks=taking_part(optimizer))
        except AgreementError as error:
            raise AgreementError(f"{when} of fit, {error}") from None

    def _meet(self, epoch: int) -> None:
        """All ranks begin the same epoch, or end together, with the same learning rate."""
        optimizer = self.model.optimizer
        inner = list(getattr(optimizer, "optimizers", [optimizer])) if optimizer is not None else []
        rates = agreement.digest(np.array([state.number(one.learning_rate) for one in inner]))
        data_epoch = self._data.epoch if self._data is not None else 0
        everyone = np.stack(TRANSPORT.gather(np.array([[epoch, rates, data_epoch]]), "hvdkit.epoch"))[:, 0]
        epochs, all_rates, data_epochs = everyone.T.tolist()
        if len(set(epochs)) > 1:
            parts = [
                f"{name_ranks([rank for rank, one in enumerate(epochs) if one == value])} "
                + ("ended the training" if value == _ENDED else f"began epoch {value + 1}")
                for value in sorted(set(epochs))
            ]
            raise AgreementError(
                f"the ranks went apart: {' while '.join(parts)}; let callbacks that stop decide by values that are "
                "the same on all ranks (the logs of an epoch), and resume from the same checkpoint."
            )
        if taking_part(optimizer) is None and len(set(all_rates)) > 1:
            raise AgreementError(
                "the ranks use different learning rates; let callbacks that change it decide by values that are the "
                "same on all ranks (the logs of an epoch), and broadcast before training."
            )
        if len(set(data_epochs)) > 1:
            raise AgreementError(
                f"the ranks' shards are at different epochs ({data_epochs}) and would overlap; iterate them alike."
            )

    def _average_statistics(self) -> None:
        """Make what no gradient trains (BatchNormalization's moving statistics) the mean over the ranks."""
        if not self._alone and taking_part(self.model.optimizer) is None:
            state.average_statistics(self.model.non_trainable_weights)


def _remember(model: Any) -> Callable[[], None]:
    """What brings the metrics back to where they are now."""
    states = States(model)
    return functools.partial(states.assign, states.values)


def _require_same(name: str, values: list[int]) -> None:
    """Raise unless a number is known on all ranks and the same."""
    if _UNKNOWN in values:
        ranks = name_ranks([rank for rank, value in enumerate(values) if value == _UNKNOWN])
        raise InvalidArgumentError(
            f"the number of {name} is unknown on {ranks} for this kind of data, and ranks with different numbers would "
            "wait for each other for ever; give fit(steps_per_epoch=...) or data with a length."
        )
    if len(set(values)) > 1:
        shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values[:8]))
        raise AgreementError(
            f"the ranks would take different numbers of {name} ({shown}{', ...' if len(values) > 8 else ''}) and wait "
            "for each other for ever; give every rank the same, see shard and steps_per_epoch."
        )
