"""A small training in a TensorFlow loop for tests that are the same in all frameworks: see training_torch.py."""

import random
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdkit.tensorflow as hk

FEATURES, CLASSES = 6, 3
BASE_LR, WARMUP = 0.02, 2
OPTIONS: dict[str, dict[str, Any]] = {}
GLOBAL_BATCH_NORM = False


def over_mpi() -> bool:
    return bool(hvd.mpi_enabled())


def set_precision(dtype: str) -> None:
    keras.config.set_floatx(dtype)


def dataset(x: np.ndarray, y: np.ndarray) -> Any:
    return x.astype(keras.config.floatx()), y


def make_optimizer(name: str, **options: Any) -> Any:
    if name == "sgd":
        return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, **options)
    return keras.optimizers.Adam(0.01, weight_decay=0.01, **options)


def make_model(seed: int, *, normalised: bool) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    middle = [layers.BatchNormalization()] if normalised else []
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(8), *middle, layers.Activation("tanh"), layers.Dense(CLASSES)]
    )


def weights(model: Any) -> list[float]:
    return np.concatenate([np.ravel(variable.numpy()).astype(float) for variable in model.trainable_variables]).tolist()


class Training:
    """The tape is distributed; where a step has several passes, the optimizer, which adds their gradients up."""

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
        self.model = make_model(seed, normalised=bool(batch_norm))
        self._loss = hk.weighted_loss(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self._on_tape = averages and passes == 1
        self._options = options
        if passes > 1:
            self.optimizer = hk.distribute(make_optimizer(optimizer, gradient_accumulation_steps=passes), **options)
        else:
            self.optimizer = make_optimizer(optimizer)
        if broadcasts:
            hk.broadcast_state(self.model, self.optimizer)
        # AutoGraph takes longer than the training; the trainings of test_tensorflow.py go through it.
        self.step = tf.function(self._step, reduce_retracing=True, autograph=False)

    def train(self, loader: Any, epochs: int, *, equal_weights: bool = False) -> None:
        for _ in range(epochs):
            for x, y, w in loader:
                self.step(x, y, tf.ones_like(w) if equal_weights else w)

    def _step(self, x: Any, y: Any, w: Any) -> None:
        tape = tf.GradientTape()
        with tape:
            loss = self._loss(y, self.model(x, training=True), w)
        if self._on_tape:
            tape = hk.distribute(tape, **self._options)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def step_in_parts(self, batches: list[tuple[np.ndarray, np.ndarray, float]]) -> None:
        with tf.GradientTape() as tape:
            losses = [self._loss(y, self.model(x, training=True), np.full(len(y), weight)) for x, y, weight in batches]
            loss = tf.add_n(losses) / len(batches)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def weights(self) -> list[float]:
        return weights(self.model)


def nudge(training: Training) -> None:
    kernel = training.model.layers[-1].kernel
    value = kernel.numpy()
    value[5, 2] += 2**-10
    kernel.assign(value)


def set_rate(optimizer: Any, rate: float) -> None:
    optimizer.learning_rate = rate


def accuracy(training: Training, data: Any, world: Any, batch_size: int) -> float:
    hits = samples = 0
    data = hk.shard(data, world, batch_size, remainder="exact")
    if world.is_root:  # a look
        assert [len(y) for _, y, _ in data.take(1)] == [batch_size]
    for x, y, w in data.evaluation():
        right = (tf.argmax(training.model(x), axis=1) == y).numpy()
        hits, samples = hits + int(right.sum()), samples + len(right)
        assert (w.numpy() == 1).all()
    assert (data.epoch, data.position.samples) == (0, 0)
    return hk.average_metrics({"accuracy": (hits, samples)}, world)["accuracy"]


def numbered(x: np.ndarray, y: np.ndarray) -> Any:
    return x, y, np.arange(len(y))


class Resumable:
    def __init__(
        self, data: Any, batch_size: int, directory: Any, compression: str = "none", **checkpointing: Any
    ) -> None:
        self._compression = compression
        self.world = hk.init()
        hk.seed_everything(1, self.world)
        layers = [keras.layers.Dense(48, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(10)]
        self.model = keras.Sequential([keras.Input((64,)), *layers])
        self.optimizer = keras.optimizers.Adam(hk.scale_lr(BASE_LR, self.world, "sqrt"))
        hk.broadcast_state(self.model, self.optimizer)
        self.loader = hk.shard(numbered(*data), self.world, batch_size, remainder="exact", seed=2)
        steps = hk.steps_per_epoch(len(data[1]), batch_size, self.world, "exact")
        self.schedule = hk.warmup(self.optimizer, self.world, steps, WARMUP, rule="sqrt")
        self.checkpoints = hk.Checkpoints(directory, keep=2, **checkpointing)
        self.saved = self.checkpoints.restore(self.model, self.optimizer, loader=self.loader, schedule=self.schedule)
        self.step = self.saved.step if self.saved else 0
        self._loss = hk.weighted_loss(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        # AutoGraph takes longer than the training; the trainings of test_tensorflow.py go through it.
        self._gradient_step = tf.function(self._apply, reduce_retracing=True, autograph=False)

    def _apply(self, x: Any, y: Any, w: Any) -> None:
        x += keras.random.normal(tf.shape(x), stddev=0.01)
        with hk.distribute(tf.GradientTape(), compression=self._compression) as tape:
            loss = self._loss(y, self.model(x, training=True), w)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def train_step(self, x: Any, y: Any, index: Any, w: Any) -> list[int]:
        noise = random.gauss(0, 0.01) + np.random.normal(0, 0.01) + float(tf.random.normal((), stddev=0.01))
        noise += float(tf.random.get_global_generator().normal((), stddev=0.01))
        self._gradient_step(x + tf.cast(noise, x.dtype), y, w)
        self.schedule.step()
        self.step += 1
        return index[w > 0].numpy().tolist()

    def rate(self) -> float:
        return float(self.optimizer.learning_rate)

    def weights(self) -> list[float]:
        return weights(self.model)

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        return float((np.argmax(self.model(x), axis=1) == y).mean())
