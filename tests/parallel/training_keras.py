"""A small training by Keras' fit for tests that are the same in all frameworks: see training_torch.py."""

import importlib
import os
import random
import signal
from typing import Any

import keras
import numpy as np

import hvdkit.keras as hk
from hvdkit.keras.data import ShardedData

FEATURES, CLASSES = 6, 3
BASE_LR, WARMUP = 0.01, 2
OPTIONS: dict[str, dict[str, Any]] = {}
GLOBAL_BATCH_NORM = False


def over_mpi() -> bool:
    library = "tensorflow" if keras.backend.backend() == "tensorflow" else "torch"
    return bool(importlib.import_module(f"horovod.{library}").mpi_enabled())


def set_precision(dtype: str) -> None:
    keras.config.set_floatx(dtype)


def dataset(x: np.ndarray, y: np.ndarray) -> Any:
    return x.astype(keras.config.floatx()), y


class EqualWeights(ShardedData):
    """The mistake: every sample counts the same on its rank, however few the rank has."""

    def _pack(self, rows: tuple[Any, ...], weight: Any) -> Any:
        return super()._pack(rows, 1.0)


class Training:
    def __init__(
        self,
        seed: int,
        optimizer: str = "sgd",
        *,
        batch_norm: str = "",
        passes: int = 1,
        averages: bool = True,
        broadcasts: bool = True,
        **options: Any,
    ) -> None:
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        middle = [layers.BatchNormalization()] if batch_norm else []
        self.model = keras.Sequential(
            [keras.Input((FEATURES,)), layers.Dense(8), *middle, layers.Activation("tanh"), layers.Dense(CLASSES)]
        )
        settings = {"weight_decay": 0.01, "gradient_accumulation_steps": passes if passes > 1 else None}
        if optimizer == "sgd":
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **settings)
        else:
            self.optimizer = keras.optimizers.Adam(0.01, **settings)
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # in the floatx of this moment
        self.model.compile(hk.distribute(self.optimizer, **options) if averages else self.optimizer, self._loss)
        self._mistaken = not (averages and broadcasts)
        self._callbacks = [hk.BroadcastState()] if broadcasts else []

    def train(self, loader: Any, epochs: int, *, equal_weights: bool = False) -> None:
        data = EqualWeights(loader._arrays, loader.share) if equal_weights else loader
        # hvdkit's own fit refuses the mistakes: an optimizer that does not average, and weights that differ.
        fit = keras.Model.fit.__wrapped__ if equal_weights or self._mistaken else keras.Model.fit
        data.in_fit = fit is not keras.Model.fit  # which hvdkit's own says to the loader
        fit(self.model, data, epochs=epochs, shuffle=False, verbose=0, callbacks=self._callbacks)

    def step_in_parts(self, batches: list[tuple[np.ndarray, np.ndarray, float]]) -> None:
        tf = importlib.import_module("tensorflow")
        with tf.GradientTape() as tape:
            losses = [self._loss(y, self.model(x, training=True), np.full(len(y), weight)) for x, y, weight in batches]
            loss = tf.add_n(losses) / len(batches)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def weights(self) -> list[float]:
        values = [np.ravel(keras.ops.convert_to_numpy(one)).astype(float) for one in self.model.trainable_variables]
        return np.concatenate(values).tolist()


def nudge(training: Training) -> None:
    kernel = training.model.layers[-1].kernel
    value = np.array(keras.ops.convert_to_numpy(kernel))
    value[5, 2] += 2**-10
    kernel.assign(value)


def set_rate(optimizer: Any, rate: float) -> None:
    optimizer.learning_rate = rate


def accuracy(training: Training, data: Any, world: Any, batch_size: int) -> float:
    training.model.compile(loss=training._loss, metrics=["accuracy"])
    return hk.evaluate(training.model, data, world, batch_size)["accuracy"]


class Numbered(keras.losses.Loss):
    """Of images whose y is (class, number)."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


class Seen(keras.metrics.Metric):
    """How often each image was trained on in the epoch; fillers have no weight."""

    def __init__(self, images: int = 0, **options: Any) -> None:
        super().__init__(name="seen", **options)
        self.counts = self.add_variable((images,), "zeros", "int32", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        counted = keras.ops.cast(keras.ops.reshape(sample_weight, (-1,)) > 0, "int32")
        numbers = keras.ops.cast(y_true[:, 1], "int32")
        self.counts.assign(self.counts + keras.ops.segment_sum(counted, numbers, self.counts.shape[0]))

    def result(self) -> Any:
        return keras.ops.sum(self.counts)


def numbered(x: np.ndarray, y: np.ndarray) -> Any:
    return x, np.stack([y, np.arange(len(y))], axis=1)


class Record(keras.callbacks.Callback):
    """Keeps what ``Resumable.fit`` tells, draws random numbers as a program may, and kills the root."""

    def __init__(self, world: Any, seen: Seen, killed_at: int) -> None:
        super().__init__()
        self._world, self._metric, self._killed_at = world, seen, killed_at
        self.began: list[int] = []
        self.rate = 0.0
        self.seen: list[int] = []
        self.batches: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self.began:
            self.began, self.rate = [self._epoch, batch], float(self.model.optimizer.learning_rate)
        self.batches.append(batch)
        random.gauss(0, 1), np.random.normal(0, 1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._killed_at and self._world.is_root and int(self.model.optimizer.iterations) == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.seen:
            counts = np.asarray(keras.ops.convert_to_numpy(self._metric.counts))
            assert set(counts) <= {0, 1}
            self.seen = np.flatnonzero(counts).tolist()


class Resumable:
    """Goes on by the callbacks of ``fit``; its other parts for loops of one's own."""

    def __init__(
        self, data: Any, batch_size: int, directory: Any, compression: str = "none", **checkpointing: Any
    ) -> None:
        self.world = hk.init()
        hk.seed_everything(1, self.world)
        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((64,)), layers.Dense(48, activation="relu"), layers.Dropout(0.2), layers.Dense(10)]
        )
        optimizer = keras.optimizers.Adam(hk.scale_lr(BASE_LR, self.world, "sqrt"))
        self.optimizer = hk.distribute(optimizer, compression=compression)
        self._seen = Seen(len(data[1]))
        self.model.compile(self.optimizer, Numbered(), weighted_metrics=[self._seen])
        self.loader = hk.shard(numbered(*data), self.world, batch_size, remainder="exact", seed=2)
        self._steps = hk.steps_per_epoch(len(data[1]), batch_size, self.world, "exact")
        self._directory, self._checkpointing = str(directory), checkpointing
        self.checkpoints = hk.Checkpoints(directory, keep=2, **checkpointing)
        self.step = 0

    def fit(self, epochs: int, killed_at: int, every: int) -> Record:
        """Train to the end, saving every so many steps; with ``killed_at`` the root kills itself after that step."""
        record = Record(self.world, self._seen, killed_at)
        callbacks = [
            hk.Checkpoint(self._directory, keep=2, every=every),
            hk.BroadcastState(),
            hk.Warmup(self.world, self._steps, WARMUP, "sqrt"),
            record,
        ]
        history = self.model.fit(self.loader, epochs=epochs, verbose=0, callbacks=callbacks)
        assert history.epoch == list(range(record.began[0], epochs))
        return record

    def begin_loop(self) -> None:
        """For ``train_step``."""
        self.schedule = hk.warmup(self.optimizer, self.world, self._steps, WARMUP, "sqrt")
        hk.broadcast_state(self.model, self.optimizer)

    def train_step(self, x: Any, y: Any, w: Any) -> None:
        self.model.train_on_batch(x, y, w)
        self.step += 1

    def rate(self) -> float:
        return float(self.optimizer.learning_rate)

    def weights(self) -> list[float]:
        return np.concatenate([np.asarray(one, "float64").reshape(-1) for one in self.model.get_weights()]).tolist()

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        return float((keras.ops.convert_to_numpy(self.model(x)).argmax(1) == y).mean())
