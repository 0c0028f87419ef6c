"""What the ranks of test_proof_keras.py do, on the backend of KERAS_BACKEND; each check returns JSON values.

They are the ranks of test_keras_edges.py: ``together`` of programs_keras_edges.py runs these checks after its own.
"""

import functools
import importlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from programs_checks import signs

import hvdkit
import hvdkit.keras as hk
from hvdkit.keras import digests as keras_digests
from hvdkit.steps import agreement

FEATURES, CLASSES, SAMPLES = 6, 3, 48
generator = np.random.default_rng(5)
X = generator.normal(size=(SAMPLES, FEATURES)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BACKEND = keras.backend.backend()


def make_model(**normalisation: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, name="hidden"),
            layers.BatchNormalization(name="normal", **normalisation),
            layers.Activation("tanh"),
            layers.Dropout(0.5, name="dropout"),
            layers.Dense(CLASSES, name="out"),
        ],
        name="net",
    )


def compiled(loss: Any = LOSS, **normalisation: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = make_model(**normalisation)
    model.compile(hk.distribute(keras.optimizers.SGD(0.01, momentum=0.9)), loss, metrics=["accuracy"])
    return model


def message(attempt: Callable[[], Any]) -> str:
    """The error of an attempt, "" where there was none."""
    try:
        attempt()
    except hvdkit.HvdkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Nudge(keras.callbacks.Callback):
    """After step 3, one element of a weight on rank 1 is 1e-4 larger."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.steps = 0
        self._here = rank == 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == 3 and self._here:
            nudge(self.model.get_layer("out").kernel)


def nudge(variable: Any) -> None:
    value = np.array(keras.ops.convert_to_numpy(variable))
    value[2, 1] += 1e-4
    variable.assign(value)


def checks(world: hvdkit.Topology) -> dict[str, Callable[[], Any]]:
    """The checks by name."""
    on_world = (statistics, disagreements, evaluated, exact, arguments)
    tensorflows = {"synchronised": functools.partial(synchronised, world)} if BACKEND == "tensorflow" else {}
    return {
        "raise": functools.partial(injected, world, "raise"),
        "warn": functools.partial(injected, world, "warn"),
        **{check.__name__: functools.partial(check, world) for check in on_world},
        **tensorflows,
        "digests": digests,
        "seeds": seeds,  # last: what is seeded stays so
    }


def injected(world: hvdkit.Topology, reaction: str) -> dict[str, Any]:
    model, nudging = compiled(), Nudge(world.rank)
    callbacks = [hk.BroadcastState(), nudging, hk.CheckAgreement(world, every=2, on_disagreement=reaction)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        error = message(lambda: model.fit(hk.shard((X, Y), world, 4), epochs=1, verbose=0, callbacks=callbacks))
    said = [str(one.message) for one in warned]
    return {"error": error, "steps": nudging.steps, "warned": [text for text in said if "disagree" in text]}


def statistics(world: hvdkit.Topology) -> dict[str, Any]:
    """BatchNormalization's moving statistics differ within an epoch and agree after it."""

    def fit(**settings: Any) -> Any:
        model = compiled()
        checking = [hk.BroadcastState(), hk.CheckAgreement(world, every=2, **settings)]
        model.fit(hk.shard((X, Y), world, 4), epochs=2, verbose=0, callbacks=checking)
        return model

    model = fit()
    agreed = message(lambda: hk.check_agreement(model, model.optimizer, world))
    moving = model.get_layer("normal").moving_mean
    moving.assign(keras.ops.convert_to_numpy(moving) + world.rank)
    return {
        "within": message(lambda: fit(statistics=True)),
        "after fit": agreed,
        "differ": message(lambda: hk.check_agreement(model, model.optimizer, world)),
        "left out": message(lambda: hk.check_agreement(model, model.optimizer, world, statistics=False)),
    }


def disagreements(world: hvdkit.Topology) -> dict[str, str]:
    """For each thing that only the last rank changes: what check_agreement says."""
    found = {}
    for kind in ("nothing", "weight", "frozen", "slot", "rate", "epoch", "seed"):
        hk.seed_everything(3, world)
        model = make_model()
        optimizer = hk.distribute(keras.optimizers.SGD(0.01, momentum=0.9))
        hk.broadcast_state(model, optimizer)
        loader = hk.shard((X, Y), world, 4)
        if kind == "frozen":
            model.trainable = False
        if world.rank == world.size - 1:
            if kind in ("weight", "frozen"):
                nudge(model.get_layer("hidden").kernel)
            elif kind == "slot":
                nudge(next(one for one in optimizer.variables if "momentum" in one.path and len(one.shape) == 2))
            elif kind == "rate":
                optimizer.learning_rate = 0.02
            elif kind == "epoch":
                loader.set_epoch(7)
            elif kind == "seed":
                hk.seed_everything(4, world)
        found[kind] = message(
            lambda model=model, optimizer=optimizer, loader=loader: hk.check_agreement(
                model, optimizer, world, loader=loader, statistics=False
            )
        )
    for kind, values in signs(world.rank).items():
        dense = keras.layers.Dense(1, use_bias=False, dtype=kind, name=kind)
        flipped = keras.Sequential([keras.Input((len(values),)), dense])
        flipped.set_weights([values[:, None]])
        found[kind] = message(lambda flipped=flipped: hk.check_agreement(flipped, None, world))
    return found


@keras.saving.register_keras_serializable("tests")
class Samples(keras.metrics.Metric):
    """A metric of the user's own: the number of samples, which is not the sum of the ranks' results."""

    def __init__(self, name: str = "samples") -> None:
        super().__init__(name=name)
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return self.seen + 0.0


def evaluated(world: hvdkit.Topology) -> dict[str, Any]:
    """For several numbers of samples: the metrics on all ranks together, and in this process alone."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(1, activation="sigmoid", kernel_regularizer="l2"), layers.Dropout(0.5)]
    )
    own = [Samples()]
    found = {}
    for name, extra in {"keras' own": [], "one of the user's": own}.items():
        auc, vector = keras.metrics.AUC(name="auc"), keras.metrics.F1Score(name="f1")
        model.compile(loss="binary_crossentropy", metrics=["accuracy", auc, vector, *extra], weighted_metrics=["mse"])
        for samples in (45, 1):
            y = Y[:samples].astype("float32")[:, None]
            weights = np.linspace(0.5, 1.5, samples).astype("float32")
            mine = hk.evaluate(model, (X[:samples], y, weights), world, 4)
            alone = model.evaluate(X[:samples], y, 16, verbose=0, sample_weight=weights, return_dict=True)
            results = {key: [np.asarray(one[key]).tolist() for one in (mine, alone)] for key in alone}
            found[f"{name}, {samples}"] = results
    return found


def exact(world: hvdkit.Topology) -> dict[str, Any]:
    """A ragged end with a filler on rank 1, in the logs; and losses that would undo the weights."""
    odd = (X[:33], Y[:33])

    def fit(loss: Any, remainder: str) -> Any:
        model = compiled(loss)
        model.optimizer.learning_rate = 0.0
        model.get_layer("normal").trainable = False
        data = hk.shard(odd, world, 4, remainder=remainder)
        held = (X[world.rank :: 2], Y[world.rank :: 2])
        averaging = [hk.BroadcastState(), hk.AverageMetrics(world)]
        history = model.fit(data, epochs=2, verbose=0, validation_data=held, callbacks=averaging).history
        return model, history

    keras.layers.Dropout.call, dropout = lambda _, inputs, training=False: inputs, keras.layers.Dropout.call
    model, history = fit(LOSS, "exact")
    tiny = compiled()
    few = tiny.fit(
        hk.shard((X[:1], Y[:1]), world, 4, remainder="exact"), verbose=0, callbacks=[hk.AverageMetrics(world)]
    ).history
    keras.layers.Dropout.call = dropout
    sum_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    by_weight = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    return {
        "logged": [history["accuracy"], history["val_accuracy"]],
        "whole": [hk.evaluate(model, part, world, 4)["accuracy"] for part in (odd, (X, Y))],
        "few": few["accuracy"],
        "refused": [message(lambda loss=loss: fit(loss, "exact")) for loss in (sum_of, {"out": by_weight})],
        "allowed": message(lambda: fit(sum_of, "drop")),
    }


def synchronised(world: hvdkit.Topology) -> list[str]:
    """The warnings of two fits of a model with BatchNormalization(synchronized=True)."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(synchronized=True).fit(hk.shard((X[:8], Y[:8]), world, 4), verbose=0)
    return [str(one.message) for one in warned if "synchronized" in str(one.message)]


def digests() -> list[bool]:
    """Whether the backend's operations digest tensors of each type and some shapes as NumPy does."""
    types = ("float16", "float32", "float64", "int64", "uint8", "bool", "complex64", "complex128")
    shapes = ((), (0,), (3, 5), (8,), (70000, 3))
    arrays = [generator.normal(size=shape).astype(kind) for shape in shapes for kind in types]
    expected = agreement.array_digests(arrays)
    if BACKEND == "tensorflow":
        tf = importlib.import_module("tensorflow")
        found = keras_digests.of_tensorflow_on_a_device([tf.constant(array) for array in arrays])
    elif BACKEND == "torch":
        torch = importlib.import_module("torch")
        found = keras_digests.of_torch([torch.from_numpy(np.array(array)) for array in arrays])
    else:
        found = agreement.array_digests(np.array(array) for array in arrays)
    return (found == expected).tolist()


def arguments(world: hvdkit.Topology) -> list[str]:
    model = compiled()
    return [
        message(lambda: hk.CheckAgreement(world, every=0)),
        message(lambda: hk.CheckAgreement(world, on_disagreement="stop")),
        message(lambda: hk.check_agreement(model, None, world, loader=[1])),
        message(lambda: hk.evaluate(model, (X, Y), world, 0)),
        message(lambda: hk.evaluate(model, (X[:0], Y[:0]), world, 4)),
        message(lambda: hk.evaluate(model, [[1.0], [0]], world, 4)),
        message(lambda: hk.seed_everything(-1, world)),
    ]


def seeds() -> list[dict[str, Any]]:
    """Two runs with one seed, and one with another."""
    world = hk.init()
    return [seeded(world, seed) for seed in (11, 11, 12)]


def seeded(world: hvdkit.Topology, seed: int) -> dict[str, Any]:
    streams = hk.seed_everything(seed, world)
    model = make_model()
    initial = np.concatenate([value.reshape(-1) for value in model.get_weights()])
    model.compile(hk.distribute(keras.optimizers.SGD(0.01)), LOSS)
    same = (X[:4], Y[:4])  # each rank's step is on the same samples: its loss differs by dropout alone
    history = keras.Model.fit(model, *same, epochs=3, verbose=0, shuffle=False, callbacks=[hk.BroadcastState()]).history
    dropout = model.get_layer("dropout")
    masks = [dropout(np.ones((1, 64), "float32"), training=True) for _ in range(2)]
    drawn = [np.random.random(), random.random(), streams.generator(1).random()]  # noqa: S311
    return {
        "initial": initial.tolist(),
        "losses": history["loss"],
        "masks": [keras.ops.convert_to_numpy(mask).reshape(-1).tolist() for mask in masks],
        "drawn": [*drawn, float(keras.ops.convert_to_numpy(keras.random.uniform(())))],
    }
