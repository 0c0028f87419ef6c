"""Variables that some ranks use and others do not, where every step is computed eagerly: equal to one process.

Frameworks and hvdkit are imported within, on the ranks.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

SAMPLES, EXPERTS, EPOCHS = 24, 4, 2
X = np.random.default_rng(8).normal(size=(SAMPLES, 3))
ROUTES = np.random.default_rng(9).integers(-1, EXPERTS - 1, SAMPLES)
"""The expert of each sample, -1: nothing that is trained; one expert is never used."""


@functools.cache
def routed_class() -> type:
    import keras

    class Routed(keras.Model):
        """A layer that all samples share, and experts; a sample that goes to none of them reaches no variable."""

        def __init__(self) -> None:
            super().__init__()
            self.shared = keras.layers.Dense(4, "tanh")
            self.experts = [keras.layers.Dense(2) for _ in range(EXPERTS)]
            self.shared.build((None, X.shape[1]))
            for expert in self.experts:
                expert.build((None, 4))
            self.built = True

        def loss_of(self, data: Any) -> Any:
            losses = []
            for row, route in zip(*data, strict=True):
                used = int(route) >= 0
                made = self.experts[int(route)](self.shared(row[None])) if used else row[None]
                losses.append(keras.ops.sum((made - 1.0) ** 2))
            return sum(losses) / len(losses)

        def train_step(self, data: Any) -> dict[str, Any]:
            weights = self.trainable_variables
            gradients = of_torch if keras.backend.backend() == "torch" else of_tensorflow
            with contextlib.suppress(ValueError), gradients(self, data, weights) as found:
                self.optimizer.apply(found, weights)  # a ValueError where no variable at all has a gradient
            return {"seen": float(len(data[0]))}

    return Routed


@contextlib.contextmanager
def of_tensorflow(model: Any, data: Any, weights: list[Any]) -> Iterator[list[Any]]:
    import tensorflow as tf

    with model.distribute(tf.GradientTape()) as tape:
        loss = model.loss_of(data)
    yield tape.gradient(loss, [one.value for one in weights])


@contextlib.contextmanager
def of_torch(model: Any, data: Any, weights: list[Any]) -> Iterator[list[Any]]:
    import torch

    model.zero_grad()
    loss = model.loss_of(data)
    if loss.requires_grad:
        loss.backward()
    with torch.no_grad():
        yield [one.value.grad for one in weights]


def trained(hk: Any, world: Any, way: str, batch: int) -> list[float]:
    """Weights and the optimizer's state after a training."""
    import keras

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    model = routed_class()()
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    optimizer.build(model.trainable_variables)
    several = world.size > 1
    model.distribute = hk.distribute if way == "tape" and several else lambda one: one
    if way != "tape" and several:
        hk.distribute(optimizer)
    loader = hk.shard((X, ROUTES), world, batch // world.size, seed=4)
    if way == "fit":
        model.compile(optimizer, run_eagerly=True)
        model.fit(loader, epochs=EPOCHS, verbose=0)
    else:
        model.optimizer = optimizer
        for _ in range(EPOCHS):
            for data in loader:
                model.train_step(data)
    held = [keras.ops.convert_to_numpy(one) for one in [*model.trainable_variables, *optimizer.variables]]
    return np.concatenate([np.ravel(one) for one in held]).astype(float).tolist()


def as_in_one_process(hk: Any, world: Any, everyone: Any, alone: Any, way: str) -> None:
    found = trained(hk, world, way, world.size)
    assert everyone(found) == [found] * world.size
    import keras

    rounds = keras.backend.backend() == "torch"  # there a float64 Dense computes in float32, also on one process
    bounds = {"rtol": 1e-5, "atol": 1e-6} if rounds else {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(found, alone(trained, way=way, batch=world.size), **bounds)


@pytest.mark.parametrize("way", ["tape", "optimizer"])
@on_ranks("tensorflow", n=3)
def test_a_loop_ends_as_in_one_process(hk, world, everyone, alone, way):
    as_in_one_process(hk, world, everyone, alone, way)


@on_ranks("keras", "keras-torch", n=3)
def test_an_eager_fit_ends_as_in_one_process(hk, world, everyone, alone):
    as_in_one_process(hk, world, everyone, alone, "fit")


@pytest.mark.parametrize("groups", [1, 2])
@on_ranks("tensorflow", n=3)
def test_rows_of_a_table_that_not_all_ranks_look_up(hk: Any, world: Any, groups: int) -> None:
    """After a first step in which all do: a rank cannot know before that a gradient is one of rows."""
    import tensorflow as tf

    table, weight = tf.Variable(np.ones((4, 2))), tf.Variable(np.ones(3))
    for sources in ([table, weight], [table]):
        for users in (range(world.size), [1], [], [0, 1]):
            with hk.distribute(tf.GradientTape(), groups=groups) as tape:
                loss = tf.reduce_sum(weight) * 0
                if world.rank in users:
                    loss += tf.reduce_sum(tf.gather(table, [world.rank, world.rank + 1])) * (world.rank + 1)
            found = tape.gradient(loss, sources)[0]
            expected = np.zeros((4, 2))
            for rank in users:
                expected[rank : rank + 2] += (rank + 1) / world.size
            if not users:
                assert found is None
                continue
            assert isinstance(found, tf.IndexedSlices)
            np.testing.assert_allclose(tf.convert_to_tensor(found), expected, rtol=1e-12)
