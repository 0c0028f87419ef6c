"""What keeps every ``fit`` of a job synchronised; the inside of ``hvdkit.keras.init``.

Horovod cannot know that an optimizer was not distributed, and Keras has no hook that every ``fit`` passes. So ``init``
replaces ``keras.Model.fit`` by one that averages the logs of each epoch before any callback of the user's sees them
(metrics.py), lets callbacks that write do so on the root (callbacks.py), and adds a callback that checks

- before training: the optimizer is distributed; epochs, and steps per epoch, are equal on all ranks;
- before and after the first step, and after the last: weights and optimizer state are bit-identical on all ranks;
- after the 1st, 2nd, 4th step and so on: what no gradient trains (masks, codebooks, counters) is the same;
- at each epoch: no rank stops alone or uses another learning rate.

Every failure is one error, raised on all ranks that are still there to raise it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from hvdkit.errors import AgreementError, InvalidArgumentError, name_ranks
from hvdkit.keras import agreement as keras_agreement
from hvdkit.keras import monitor, private, state
from hvdkit.keras.data import SHARDED, Evaluation, reader_of, set_trained_on
from hvdkit.keras.optimizer import held_by
from hvdkit.keras.trainer import evaluation, metrics, requirements, watch
from hvdkit.keras.trainer.callbacks import on_the_root
from hvdkit.keras.trainer.metrics import AverageOfFit, States
from hvdkit.keras.trainer.requirements import UNKNOWN
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps import agreement, divergence, passes
from hvdkit.steps.streams import StreamInEpochs
from hvdkit.tf_shared.keras_layers import layers_of
from hvdkit.tf_shared.keras_optimizer import rates as learning_rates
from hvdkit.tf_shared.keras_optimizer import require_keras_3, taking_part

_ENDED, _AGREED_ON = -2, -3
_FIX = "let BroadcastState give every rank the root's when fit begins"
_OWN = "What each rank is to have for itself is kept in a tensor or array, not in a weight."


def install() -> None:
    """Guard ``keras.Model.fit`` in this process, once, and where Keras 2 (tf_keras) is in use its ``fit`` too."""
    legacy = "tf_keras" in sys.modules or os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if legacy and importlib.util.find_spec("tf_keras") is not None:
        private.replace(private.LEGACY_FIT, _refusing)
    private.replace(private.FIT, _guarded)
    private.replace(private.TRAIN_ON_BATCH, _refusing_undistributed)
    private.replace(private.EVALUATE, evaluation.evaluating)
    private.replace(private.PREDICT, evaluation.predicting)
    private.replace(private.APPLY, requirements.warning_of_undistributed)
    private.replace(private.REST, private.go_on_in_mid_epoch)
    if keras.backend.backend() == "tensorflow":
        private.replace(private.BUILD, private.build_by_first_batch)
        private.replace(private.TF_DATASET, private.by_tf_data)
    else:
        private.replace(private.STANDARDIZE, private.as_packed)
    if keras.backend.backend() == "torch":
        private.replace(private.MAKE_STEP, functools.partial(private.telling_steps, TRANSPORT.tell_step))
    if keras.backend.backend() == "jax":
        private.mark_clipped()  # here: a model makes optax's transformations before its optimizer is distributed
    TRANSPORT.before_shutdown(private.undo)


def _guarded(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' ``fit`` with what several ranks need around it: checks, its own reader, the guard."""
    signature = inspect.signature(plain)

    def fit(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        model, data = call.arguments["self"], call.arguments["x"]
        guard, weights = Guard(call.arguments), ""
        if isinstance(call.arguments["validation_data"], (*SHARDED, Evaluation)):
            held, samples = evaluation.part_of(call.arguments["validation_data"], call.arguments["validation_steps"])
            call.arguments.update(validation_data=held, validation_steps=None)
            guard.validates_nothing = samples == 0
        if state.world().size > 1:
            requirements.prepare(model)
            metrics.note(model, trains=True)
            exact = isinstance(data, SHARDED) and data.share.remainder == "exact"
            if exact:
                weights = "batch and samples" if data.parts == 3 or call.arguments["class_weight"] else "batch"
            if exact and model.compiled:
                requirements.refuse_what_undoes_weights(model)
            if any(getattr(layer, "synchronized", False) for layer in layers_of(model)):
                requirements.warn_of_synchronized()
            if not state.world().is_root:
                call.arguments["verbose"] = 0
        if isinstance(data, SHARDED):
            call.arguments["shuffle"] = False  # it draws the same order on all ranks; Keras would draw one on each
            call.arguments["x"] = guard.reader
            call.arguments["class_weight"] = None  # the reader knows it
        set_trained_on(model, data if isinstance(data, SHARDED) else None)
        call.arguments["callbacks"] = _with_guard(guard, call.arguments["callbacks"])
        private.WITHOUT_BATCH.add(model)
        within, TRANSPORT.in_fit = TRANSPORT.in_fit, True
        try:
            with requirements.weighing(model, weights), passes.fit():
                history = plain(*call.args, **call.kwargs)
            guard.check(model, "at the end")
            guard.done()
        except BaseException as error:
            cause = getattr(guard.reader, "failure", None) or error  # TensorFlow tells a stream's in words of its own
            guard.left(cause)
            monitor.left(model)
            if cause is not error:
                raise cause from None
            raise
        finally:
            TRANSPORT.in_fit = within
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


def _refusing_undistributed(plain: Callable[..., Any]) -> Callable[..., Any]:
    def train_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        requirements.trace_for(self, "")
        if self.train_function is None and state.world().size > 1:
            requirements.prepare(self, "train_on_batch")
            weights = self.trainable_variables if state.is_built(self) else []  # on every rank, or the others wait
            _compare(weights, held_by(self), "before the first step of train_on_batch")
        return plain(self, *args, **kwargs)

    return train_on_batch


def _compare(variables: list[Any], optimizers: Mapping[str, Any], when: str) -> None:
    try:
        keras_agreement.compare(variables, optimizers, ranks=taking_part(optimizers))
    except AgreementError as error:
        raise AgreementError(f"{when}, {error}") from None


def _say_why_it_cannot_go_on(error: BaseException, why: str) -> None:
    """Horovod's error for a collective that has lost a rank, in a sentence; elastic training waits for this type."""
    if not why and "Horovod has been shut down" not in str(error):
        return
    if not why:
        why = "Horovod has been shut down: another rank has failed or ended; the first error in its output says why"
    gone: type[Exception] = AgreementError
    with contextlib.suppress(ImportError):  # over mpi4py there may be no Horovod
        from horovod.common.exceptions import HorovodInternalError

        gone = HorovodInternalError
    raise gone(f"rank {state.world().rank} cannot go on: {why}.") from error


def _with_guard(guard: Guard, callbacks: Any) -> Any:
    """The callbacks of one ``fit``: the guard, on several ranks the means of the logs, the user's, what they share."""
    own = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    world = state.world()
    guard.swaps = any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in keras.tree.flatten(own or []))
    if world.size > 1:
        whole = [guard, AverageOfFit(world), *on_the_root(own), *monitor.automatic()]
    else:
        whole = [guard, *keras.tree.flatten(own or []), *monitor.automatic()]
    if own is callbacks:
        return whole
    return keras.callbacks.CallbackList(whole, model=callbacks.model, **(callbacks.params or {}))


class Guard(keras.callbacks.Callback):  # type: ignore[misc]
    """The checks of one ``fit``; the first of its callbacks.

    Args:
        arguments: of ``fit``.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        data, sharded = arguments["x"], isinstance(arguments["x"], SHARDED)
        self._data: Any = data if sharded else None
        # on_train_batch_end only counts, in a thread of Keras' where that is late; a stream's next step waits for it.
        self.async_safe = not isinstance(data, StreamInEpochs)
        self.reader: Any = reader_of(data, arguments["class_weight"]) if sharded else None
        self._shards_validation = isinstance(arguments["validation_data"], (*SHARDED, Evaluation))
        self.validates_nothing = False
        validates = arguments["validation_data"] is not None or arguments["validation_split"]
        when = np.frombuffer(repr(arguments["validation_freq"]).encode(), dtype=np.uint8)
        self._validation = agreement.digest(when) if validates else UNKNOWN
        self._all_validate = False
        self._alone = state.world().size == 1
        self._mark = UNKNOWN if self._alone else requirements.mark_of([arguments["x"], arguments["y"]])
        self._begun = self._stepped = self.swaps = False
        self._first_batch, self._last_batch = 0, -1
        self._epoch, self._batch, self._loss, self._stopped = 0, 0, None, False
        self._untrained, self._steps = divergence.UntrainedState(_FIX, _OWN, stacklevel=8), 0
        self._watch: watch.Watch | None = None
        self._forget_filler: Callable[[], None] | None = None

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        if self._alone:
            return
        requirements.refuse_ddp(self.model)
        if self.swaps:
            requirements.refuse_swapping(self.model)
        unknown = _AGREED_ON if isinstance(self._data, StreamInEpochs) else UNKNOWN
        facts = {"steps per epoch": self.params.get("steps") or unknown, "epochs": self.params["epochs"]}
        mine = np.array([[*facts.values(), self._validation, self._mark, self._shards_validation]], dtype=np.int64)
        everyone = np.stack(TRANSPORT.allgather(mine, "hvdkit.fit"))[:, 0]
        for name, values in zip(facts, everyone.T.tolist(), strict=False):
            requirements.require_same(name, values)
        if taking_part(held_by(self.model)) is None:
            requirements.warn_of_equal_data(everyone[:, 3].tolist())
        self._all_validate = bool((everyone[:, 2] == self._validation).all()) and self._validation != UNKNOWN
        sharded = everyone[:, 4]
        if sharded.any() and not (sharded.all() and self._all_validate):
            raise AgreementError(
                f"{name_ranks(np.flatnonzero(sharded).tolist())} gave fit validation data from shard, of which each "
                "rank has a part, and other ranks gave other data, none, or another validation_freq; give every rank "
                "the same, or the root alone the arrays themselves."
            )
        self._watch = watch.begin(TRANSPORT)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._first_batch, self._epoch, self._batch = 0, epoch, 0
        passes.go_on_elsewhere()
        if not self._begun and self._data is not None and self.reader is not None:
            if epoch > self._data.epoch:  # a resumed training goes on with its own epoch's order
                self._data.set_epoch(epoch)
            self.reader.go_to(self._data)
            self._first_batch = self._data.steps_done
        if not self._alone:
            self._meet(epoch)
            if not self._begun and state.is_built(self.model):
                variables = state.model_variables(self.model)
                self._check(variables, "before the first step")
        self._begun = True
        self._last_batch = self._first_batch - 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._batch = batch
        if self._watch is not None:
            self._watch.at(self._epoch, batch)
        if batch > self._first_batch:
            self._check_first_step()
            self._check_untrained()
        if self._data is not None and self._forget_filler is None and self._data.fills(batch):
            from_first = self._data.fills(self._first_batch)
            self._forget_filler = self.model.reset_metrics if from_first else _remember(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batch, self._loss = batch, (logs or {}).get("loss")
        if self._data is not None:
            self._data.advance(min(batch, (self.params["steps"] or batch + 1) - 1) - self._last_batch)
        self._last_batch = max(self._last_batch, batch)

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras before a validation."""
        self._stop_together()
        self._without_filler()
        if self._all_validate:
            self._average_statistics()

    def on_test_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras after a validation."""
        if self.validates_nothing:
            self.model.reset_metrics()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        if self._alone:
            return
        self._stop_together()
        self._without_filler()
        taken, expected = self._last_batch + 1, self.params["steps"]
        if expected is not None and taken < expected and not self.model.stop_training:
            raise InvalidArgumentError(
                f"the data of rank {state.world().rank} ended after {taken} of {expected} steps in epoch "
                f"{epoch + 1}, and the other ranks wait for it; give every rank the same number of batches (shard)."
            )
        self._check_first_step()
        self._check_untrained()
        self._average_statistics()

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        if not self._alone:
            self._meet(_ENDED)

    def done(self) -> None:
        """All ranks have come to the end."""
        if self._watch is not None:
            self._watch.done()

    def left(self, error: BaseException) -> None:
        """Have the other ranks fail with this one.

        Raises:
            HorovodInternalError: this one fails because of another.
        """
        if self._watch is None:
            _say_why_it_cannot_go_on(error, "")
            return
        self._watch.left(f"{self._place('failed')}: {' '.join(f'{type(error).__name__}: {error}'.split())}")
        if self._watch.followed or not self._watch.verdict:
            _say_why_it_cannot_go_on(error, self._watch.verdict)
        elif self._watch.verdict not in str(error):
            error.add_note(f"hvdkit: {self._watch.verdict}.")

    def _stop_together(self) -> None:
        """Go on when no rank stops in mid-epoch, or all do after the same batch."""
        if self._watch is None or not self.model.stop_training or self._stopped:
            return
        steps = self.params["steps"] or 0
        if self._data.goes_on() if isinstance(self._data, StreamInEpochs) else self._last_batch + 1 < steps:
            self._stopped = True
            loss = "" if self._loss is None else f" (loss {state.number(self._loss):g})"
            self._watch.stopped(f"{self._place('stopped')}: a callback set model.stop_training{loss}")

    def _place(self, what: str) -> str:
        steps = f" of {self.params['steps']}" if self.params.get("steps") else ""
        return f"rank {state.world().rank} {what} in epoch {self._epoch + 1}, batch {self._batch + 1}{steps}"

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
            requirements.refuse_ddp(self.model)  # which Keras may have made in this step
            self._check(self.model.trainable_variables, "after the first step")

    def _check_untrained(self) -> None:
        """A step has been taken: look now and then at what no gradient trains."""
        self._steps += 1
        told = divergence.is_due(self._steps) or self._untrained.suspects
        if self._alone or not told or agreement.WARNING or taking_part(held_by(self.model)) is not None:
            return
        seen = state.untrained_state(self.model, self._untrained.suspects)
        # Gathered, not reduced: TensorFlow gives eager allreduces one name, and a timeline would take them for steps.
        mine = np.array([agreement.digest(seen.table())], dtype=np.int64)
        if len({int(one[0]) for one in TRANSPORT.allgather(mine, "hvdkit.untrained_digest")}) == 1:
            self._untrained.suspects.clear()
        else:
            self._untrained.compare(TRANSPORT, seen)

    def _check(self, variables: list[Any], when: str) -> None:
        _compare(variables, held_by(self.model), f"{when} of fit")

    def _meet(self, epoch: int) -> None:
        """All ranks begin the same epoch, or end together, with the same learning rate."""
        optimizers = held_by(self.model)
        rates = agreement.digest(np.array(learning_rates(optimizers)))
        data_epoch = self._data.epoch if self._data is not None else 0
        everyone = np.stack(TRANSPORT.allgather(np.array([[epoch, rates, data_epoch]]), "hvdkit.epoch"))[:, 0]
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
        if taking_part(optimizers) is None and len(set(all_rates)) > 1:
            whose = f" in {' or '.join(optimizers)}" if len(optimizers) > 1 else ""
            raise AgreementError(
                f"the ranks use different learning rates{whose}; let callbacks that change it decide by values that "
                "are the same on all ranks (the logs of an epoch), and broadcast before training."
            )
        if len(set(data_epochs)) > 1:
            raise AgreementError(
                f"the ranks' shards are at different epochs ({data_epochs}) and would overlap; iterate them alike."
            )

    def _average_statistics(self) -> None:
        """Make what no gradient trains (BatchNormalization's moving statistics) the mean over the ranks."""
        if not self._alone and taking_part(held_by(self.model)) is None:
            state.average_statistics(self.model.non_trainable_weights)


def _remember(model: Any) -> Callable[[], None]:
    """What brings the metrics back to where they are now."""
    states = States(model)
    return functools.partial(states.assign, states.values)
