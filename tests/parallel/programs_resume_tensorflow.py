"""What the ranks of test_resume_tensorflow.py do; each function returns JSON values."""

import os
import random
import signal
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdkit
import hvdkit.tensorflow as hk
from hvdkit import datasets

EPOCHS, BATCH, BASE_LR, WARMUP = 5, 24, 0.02, 2
DIGITS = datasets.load("digits")


def numbered() -> Any:
    """The training images, each with its number."""
    return DIGITS.x_train.reshape(-1, 64), DIGITS.y_train, np.arange(len(DIGITS.y_train))


def weights(model: keras.Model) -> list[float]:
    return np.concatenate([np.ravel(variable.numpy()) for variable in model.trainable_variables]).tolist()


def message(attempt: Any) -> str:
    try:
        attempt()
    except hvdkit.HvdkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Run:
    """A training that can be interrupted anywhere and resumed on any number of ranks."""

    def __init__(self, directory: str, **options: Any) -> None:
        self.world = hk.init()
        hk.pin_device(self.world, "cpu")
        hk.seed_everything(1, self.world)
        layers = [keras.layers.Dense(48, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(10)]
        self.model = keras.Sequential([keras.Input((64,)), *layers])
        self.optimizer = keras.optimizers.Adam(hk.scale_lr(BASE_LR, self.world, "sqrt"))
        hk.broadcast_state(self.model, self.optimizer)
        self.loader = hk.shard(numbered(), self.world, BATCH, remainder="exact", seed=2)
        steps = hk.steps_per_epoch(len(DIGITS.y_train), BATCH, self.world, "exact")
        self.schedule = hk.warmup(self.optimizer, self.world, steps, WARMUP, rule="sqrt")
        self.checkpoints = hk.Checkpoints(directory, keep=2, **options)
        self.saved = self.checkpoints.restore(self.model, self.optimizer, loader=self.loader, schedule=self.schedule)
        self.step = self.saved.step if self.saved else 0
        # AutoGraph takes longer than the training; the trainings of test_tensorflow.py go through it.
        self._gradient_step = tf.function(self._apply, reduce_retracing=True, autograph=False)

    def _apply(self, x: Any, y: Any, w: Any) -> None:
        loss_of = hk.weighted_loss(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x += keras.random.normal(tf.shape(x), stddev=0.01)
        with hk.distribute(tf.GradientTape()) as tape:
            loss = loss_of(y, self.model(x, training=True), w)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def train_step(self, x: Any, y: Any, w: Any) -> None:
        """With random numbers from everything that is saved."""
        noise = random.gauss(0, 0.01) + np.random.normal(0, 0.01) + float(tf.random.normal((), stddev=0.01))
        noise += float(tf.random.get_global_generator().normal((), stddev=0.01))
        self._gradient_step(x + tf.cast(noise, x.dtype), y, w)
        self.schedule.step()
        self.step += 1

    def save(self) -> Any:
        return self.checkpoints.save(self.model, self.optimizer, step=self.step, loader=self.loader)

    def accuracy(self) -> float:
        hits = np.argmax(self.model(DIGITS.x_test.reshape(-1, 64)), axis=1) == DIGITS.y_test
        return float(hits.mean())


def train(directory: str, killed_at: int = 0) -> dict[str, Any]:
    """Train to the end, saving every third step; with ``killed_at`` the root kills itself after that step."""
    run = Run(directory)
    began, first_rate = (run.loader.epoch, run.loader.position.samples), float(run.optimizer.learning_rate)
    first_epoch: list[int] = []
    for epoch in range(run.loader.epoch, EPOCHS):
        for x, y, index, w in run.loader:
            run.train_step(x, y, w)
            first_epoch += index[w > 0].numpy().tolist() if epoch == began[0] else []
            if run.step % 3 == 0:
                run.save()
            if run.step == killed_at and run.world.is_root:
                os.kill(os.getpid(), signal.SIGKILL)
    hk.check_agreement(run.model, run.optimizer, run.world, loader=run.loader)
    return {
        "weights": weights(run.model),
        "accuracy": run.accuracy(),
        "began": began,
        "first rate": first_rate,
        "last rate": float(run.optimizer.learning_rate),
        "first epoch": first_epoch,
        "step": run.step,
        "metadata": run.saved.metadata if run.saved else None,
        **(stores(run, f"{directory}/stores") if run.world.size == 2 and run.saved is None else {}),
    }


def stores(run: Run, directory: str) -> dict[str, Any]:
    """Best and newest, positions that are known and unknown, what does not fit, and ``fit`` that goes on."""
    run.checkpoints = hk.Checkpoints(directory, keep=2, keep_best=1)
    run.loader.set_epoch(0)
    first = run.step
    kept = []
    batches = iter(run.loader)
    for score in (0.2, 0.9, 0.3, 0.4):
        x, y, _, w = next(batches)
        run.train_step(x, y, w)
        kept.append(weights(run.model))
        run.checkpoints.save(run.model, run.optimizer, step=run.step, loader=run.loader, score=score, note="x")
    best = run.checkpoints.restore(run.model, which="best")
    back = weights(run.model) == kept[1]
    newest = run.checkpoints.restore(run.model, run.optimizer, loader=run.loader)
    other = hk.shard(numbered(), run.world, BATCH, seed=3)
    mapped = hk.shard(numbered(), run.world, BATCH)
    next(iter(mapped.map(lambda *parts: parts)))
    handed = iter(other)
    next(handed)
    known = other.position.samples
    tf.function(lambda batches: next(batches), autograph=False)(handed)
    unknown = message(other.state)
    errors = [
        message(lambda: hk.Checkpoints(__file__ + "/run").save(run.model, step=1)),
        message(lambda: run.checkpoints.restore(run.model, which="oldest")),
        message(lambda: run.checkpoints.restore(run.model, run.optimizer, loader=other)),
        message(lambda: run.checkpoints.restore(run.model, run.optimizer, loader=[1])),
        message(lambda: run.checkpoints.restore(run.model, run.optimizer, schedule=run.schedule)),
        message(lambda: run.checkpoints.save(run.model, step=9, score=float("nan"))),
        message(lambda: run.checkpoints.save(run.model, step=9, loader=mapped)),
        unknown,
    ]
    return {
        "best": [best.step - first, best.score, back],
        "newest": [newest.step - first, weights(run.model) == kept[3], len(run.loader)],
        "position": newest.metadata["data"],
        "known": known,
        "errors": errors,
        "fits": [fit(directory, epochs) for epochs in (2, 4, 4)],
    }


def fit(directory: str, epochs: int) -> Any:
    """``hk.fit`` with the same directory: how many epochs it trained, and the weights."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"batch_size": 64, "base_lr": 0.1, "warmup_epochs": 1, "kind": "cpu"}
    options |= {"epochs": epochs, "checkpoint_dir": f"{directory}/fit"}
    history = hk.fit(model, keras.optimizers.SGD, loss, numbered()[:2], **options)
    return [len(history), weights(model)]
