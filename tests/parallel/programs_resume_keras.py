"""What the ranks of test_resume_keras.py do, on the backend of KERAS_BACKEND; each function returns JSON values."""

import functools
import os
import random
import signal
from typing import Any

import keras
import numpy as np
from programs_checks import run_checks

import hvdkit
import hvdkit.keras as hk
from hvdkit import datasets

BATCH, BASE_LR, WARMUP = 24, 0.01, 2
DIGITS = datasets.load("digits")
X = DIGITS.x_train.reshape(-1, 64)
Y = np.stack([DIGITS.y_train, np.arange(len(X))], axis=1)  # each image's class and number


class Loss(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


class Seen(keras.metrics.Metric):
    """How often each image was trained on in the epoch; fillers have no weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__(name="seen", **options)
        self.counts = self.add_variable((len(X),), "zeros", "int32", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        counted = keras.ops.cast(keras.ops.reshape(sample_weight, (-1,)) > 0, "int32")
        numbers = keras.ops.cast(y_true[:, 1], "int32")
        self.counts.assign(self.counts + keras.ops.segment_sum(counted, numbers, len(X)))

    def result(self) -> Any:
        return keras.ops.sum(self.counts)


class Record(keras.callbacks.Callback):
    """Keeps what was seen in the first epoch, draws random numbers as a program may, and kills the root."""

    def __init__(self, world: Any, killed_at: int) -> None:
        super().__init__()
        self.world, self.killed_at, self.seen, self.began, self.rate = world, killed_at, None, None, None
        self.batches: list[int] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.began is None:
            self.began, self.rate = [self.epoch, batch], float(self.model.optimizer.learning_rate)
        self.batches.append(batch)
        random.gauss(0, 1), np.random.normal(0, 1)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.killed_at and self.world.is_root and int(self.model.optimizer.iterations) == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.seen is None:
            (metric,) = [one for one in find_metrics(self.model) if isinstance(one, Seen)]
            self.seen = np.asarray(keras.ops.convert_to_numpy(metric.counts)).tolist()


def find_metrics(model: Any) -> list[Any]:
    return [one for metric in model.metrics for one in [metric, *getattr(metric, "metrics", [])]]


def weights(model: Any) -> list[float]:
    return np.concatenate([np.asarray(value, "float64").reshape(-1) for value in model.get_weights()]).tolist()


def message(attempt: Any) -> str:
    try:
        attempt()
    except hvdkit.HvdkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def prepare() -> tuple[Any, Any, Any, Any]:
    world = hk.init()
    hk.seed_everything(1, world)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(48, activation="relu"), layers.Dropout(0.2), layers.Dense(10)]
    )
    optimizer = hk.distribute(keras.optimizers.Adam(hk.scale_lr(BASE_LR, world, "sqrt")))
    model.compile(optimizer, Loss(), weighted_metrics=[Seen()])
    return world, model, optimizer, hk.shard((X, Y), world, BATCH, remainder="exact", seed=2)


def train(directory: str, epochs: int, killed_at: int = 0) -> dict[str, Any]:
    """Train to the end, saving every third step; with ``killed_at`` the root kills itself after that step."""
    world, model, optimizer, data = prepare()
    steps = hk.steps_per_epoch(len(X), BATCH, world, "exact")
    record = Record(world, killed_at)
    callbacks = [
        hk.Checkpoint(directory, keep=2, every=3),
        hk.BroadcastState(),
        hk.Warmup(world, steps, WARMUP, "sqrt"),
        record,
    ]
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    hk.check_agreement(model, optimizer, world, loader=data)
    hits = (keras.ops.convert_to_numpy(model(DIGITS.x_test.reshape(-1, 64))).argmax(1) == DIGITS.y_test).mean()
    return {
        "weights": weights(model),
        "accuracy": float(hits),
        "began": record.began,
        "epochs": history.epoch,
        "batches": record.batches,
        "first rate": record.rate,
        "last rate": float(optimizer.learning_rate),
        "seen": record.seen,
        "drawn": [random.gauss(0, 1), float(np.random.random())],
        "data": data.state(),
    }


def resume(directory: str, interrupted: str, epochs: int) -> None:
    """Go on with the interrupted training, in a process that has just begun; only then train without interruption."""
    checks = {
        "resumed": functools.partial(train, interrupted, epochs),
        "whole": functools.partial(train, f"{directory}/whole", epochs),
    }
    if keras.backend.backend() == "tensorflow":
        checks["stores"] = functools.partial(stores, directory)
    run_checks(checks, directory, hk.init().rank)


def stores(directory: str) -> dict[str, Any]:
    """A loop of one's own, best and newest, the callback's monitor, and what does not fit."""
    world, model, optimizer, data = prepare()
    schedule = hk.warmup(optimizer, world, hk.steps_per_epoch(len(X), BATCH, world, "exact"), WARMUP, "sqrt")
    hk.broadcast_state(model, optimizer)
    checkpoints = hk.Checkpoints(f"{directory}/run", keep=2, keep_best=1)
    kept = []
    for score, (x, y, w) in zip((0.2, 0.9, 0.3, 0.4), data, strict=False):
        model.train_on_batch(x, y, w)
        kept.append(weights(model))
        checkpoints.save(model, optimizer, step=len(kept), loader=data, score=score, note="x")
    best = checkpoints.restore(model, which="best")
    back = weights(model) == kept[1]
    optimizer.learning_rate = 0.5
    newest = checkpoints.restore(model, optimizer, loader=data, schedule=schedule)
    newest_back = weights(model) == kept[3]
    rest = sum(1 for _ in data)
    other = hk.shard((X, Y), world, BATCH, seed=3)
    monitoring = hk.Checkpoint(f"{directory}/fit", keep=1, keep_best=1, monitor="loss", mode="min")
    losses = model.fit(data, initial_epoch=1, epochs=4, verbose=0, callbacks=[hk.AverageMetrics(world), monitoring])
    scored = hk.Checkpoints(f"{directory}/fit").restore(model, which="best")
    short = {"epochs": 9, "verbose": 0}
    state = hk.ElasticState(model, optimizer, loader=data, schedule=schedule, step=0)
    commit = hk.ElasticCommit(state, every=7)
    again = {"initial_epoch": data.epoch, "epochs": data.epoch + 1, "verbose": 0}
    once = hk.run_elastic(lambda state: model.fit(state.loader, **again, callbacks=[schedule, commit]).epoch, state)
    options = {"epochs": 1, "batch_size": BATCH, "base_lr": BASE_LR, "checkpoint_dir": f"{directory}/one-call"}

    def one_call(epochs: int) -> int:
        small = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        arguments = {**options, "epochs": epochs}
        return len(hk.fit(small, keras.optimizers.SGD, Loss(), (X, Y), **arguments))

    return {
        "best": [best.step, best.score, back],
        "newest": [newest.step, newest_back, rest],
        "metadata": newest.metadata,
        "score": [scored.score, -min(losses.history["loss"])],
        "elastic without a launch": [once, state.loader.state()["epoch"], state._commits],
        "fit": [one_call(1), one_call(3), one_call(3)],
        "errors": [
            message(lambda: checkpoints.restore(model, which="oldest")),
            message(lambda: checkpoints.restore(model, optimizer, loader=other)),
            message(lambda: checkpoints.restore(model, optimizer, loader=[1])),
            message(lambda: checkpoints.restore(model, optimizer, schedule=schedule)),
            message(lambda: checkpoints.save(model, step=9, score=float("nan"))),
            message(lambda: hk.Checkpoint(directory, every=0)),
            message(lambda: hk.Checkpoint(directory, keep_best=1)),
            message(lambda: hk.Checkpoint(directory, monitor="loss", mode="up")),
            message(lambda: model.fit(X[:48], Y[:48], **short, callbacks=[hk.Checkpoint(f"{directory}/x", every=2)])),
            message(lambda: model.fit(data, **short, callbacks=[hk.Checkpoint(f"{directory}/y", monitor="f1")])),
            message(lambda: hk.ElasticState(model, optimizer, loader=[1])),
            message(lambda: hk.ElasticState(model, optimizer, loader=data, schedule=3)),
            message(lambda: hk.ElasticState(model, optimizer, loader=data, rule="cubic")),
            message(lambda: hk.ElasticCommit(data)),
            message(lambda: hk.ElasticCommit(state, every=0)),
            message(lambda: model.fit(other, **short, callbacks=[commit])),
        ],
    }
