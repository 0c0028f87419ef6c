"""``compression="auto"`` on real ranks; how long a step takes is what the tests say."""

import logging
import sys
from typing import Any

import numpy as np
import pytest
from ranks import needs, on_ranks

KINDS = ("none", "bf16", "int8")
OFF = {"none": (0.0, 1e-6), "bf16": (1e-4, 2**-7), "int8": (2**-7, 5 / 127)}
"""Of a mean of numbers up to 1: the largest of thousands of errors lies between these."""
SIZE = 5000
STEPS = 9 * 3


class Clock:
    """Says that a step takes as long as its kind; asked once in each exchange of a trial."""

    def __init__(self, seconds: Any) -> None:
        self._seconds, self._now, self.asked = seconds, 0.0, 0

    def __call__(self) -> float:
        before, self._now = self._now, self._now + self._seconds[turn(self.asked)]
        self.asked += 1
        return before


def turn(number: int) -> str:
    """The kind of an exchange of the trial."""
    return KINDS[(number + number // 3) % 3] if number < STEPS else "none"


def torch_mean(hk: Any) -> Any:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(1, SIZE, bias=False)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 0.0), model, compression="auto", bucket_mb=0.008)

    def mean(gradient: Any) -> Any:
        optimizer.zero_grad()
        (model.weight[:, 0] * torch.from_numpy(gradient)).sum().backward()
        optimizer.step()
        return model.weight.grad.numpy()[:, 0].copy()

    mean(np.zeros(SIZE, np.float32))  # the ranks agree what they train
    return mean


def tensorflow_mean(hk: Any, in_graph: bool) -> Any:
    import tensorflow as tf

    variable = tf.Variable(tf.zeros(SIZE))

    def gradient(given: Any) -> Any:
        with hk.distribute(tf.GradientTape(), compression="auto") as tape:
            target = tf.reduce_sum(variable * given)
        return tape.gradient(target, [variable])[0]

    step = tf.function(gradient) if in_graph else gradient
    return lambda given: step(tf.constant(given)).numpy()


def keras_mean(hk: Any) -> Any:
    """By ``fit``, of a batch that is the gradient; the step is as long as the mean."""
    import keras

    model = keras.Sequential([keras.Input((SIZE,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(hk.distribute(keras.optimizers.SGD(1.0), compression="auto"), lambda _, found: found)
    hk.broadcast_state(model)

    def mean(given: Any) -> Any:
        model.set_weights([np.zeros((SIZE, 1), np.float32)])
        model.train_on_batch(given[None], np.zeros((1, 1), np.float32))
        return -model.get_weights()[0][:, 0]

    if keras.backend.backend() == "torch":
        mean(np.zeros(SIZE, np.float32))  # the ranks agree what they train
    return mean


def arrays_mean(hk: Any, *, started: bool) -> Any:
    reduce = hk.distribute({"w": np.zeros(SIZE, np.float32)}, compression="auto")
    if started:
        return lambda given: reduce.start({"w": given}).wait()["w"]
    return lambda given: reduce({"w": given})["w"]


def average_mean(hk: Any, world: Any) -> Any:
    """In what ``jax.jit`` compiles."""
    import jax

    from hvdkit.arrays import optax_transformations

    optax_transformations._reductions.clear()  # of the case before
    average = hk.average(world, compression="auto")
    step = jax.jit(lambda given: average.update({"w": given}, average.init(None))[0]["w"])
    return lambda given: np.asarray(step(given))


def mean_of(hk: Any, world: Any, how: str) -> Any:
    """What gives the mean of all ranks' gradients, float32 (SIZE,), by ``compression="auto"``."""
    if hk.__name__ == "hvdkit.torch":
        return torch_mean(hk)
    if hk.__name__ == "hvdkit.tensorflow":
        return tensorflow_mean(hk, in_graph=how == "compiled")
    if hk.__name__ == "hvdkit.keras":
        return keras_mean(hk)
    return average_mean(hk, world) if how == "compiled" else arrays_mean(hk, started=how == "behind")


TIMES = pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({"none": 1.0, "bf16": 0.5, "int8": 0.48}, "bf16"),
        ({"none": 1.0, "bf16": 0.96, "int8": 0.97}, "none"),
        ({"none": 1.0, "bf16": 0.9, "int8": 0.4}, "int8"),
    ],
)


def check(hk: Any, world: Any, everyone: Any, monkeypatch: Any, how: str, seconds: Any, wanted: str) -> None:
    """That all ranks choose what is wanted, once the root says so, and that every mean before and after is right."""
    from hvdkit.core import compression

    others = {"none": 0.1, "bf16": 0.2, "int8": 0.2 if wanted == "int8" else 0.09}
    clock = Clock(seconds if world.rank == world.size - 1 else others)
    monkeypatch.setattr(compression, "clock", clock)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvdkit").addHandler(handler)
    if averaging := sys.modules.get("hvdkit.tensorflow.optimizer"):
        averaging._function.cache_clear()
        averaging.TRIALS.clear()  # of the case before, whose gradients had the same names
    try:
        mean = mean_of(hk, world, how)
        for number in range(STEPS + 7):
            of_ranks = np.random.default_rng(number).uniform(-1, 1, (world.size, SIZE)).astype(np.float32)
            error = np.abs(mean(of_ranks[world.rank]) - of_ranks.mean(axis=0)).max()
            lowest, highest = OFF[turn(number) if number <= STEPS else wanted]
            assert lowest <= error <= highest, (number, error)
    finally:
        logging.getLogger("hvdkit").removeHandler(handler)
    assert clock.asked == STEPS + 1
    lines = everyone(said)
    assert [len(line) for line in lines] == [1] + [0] * (world.size - 1)
    assert f"takes {wanted!r} from now on: a step takes" in lines[0][0]
    kept = compression._KEPT.values()
    assert any(holder() is not None for holder, _, _ in kept) == (wanted == "int8")


@TIMES
@on_ranks("torch", n=(2, 3), smoke=("keras-torch",))
def test_the_slowest_rank_chooses_for_all(hk, world, everyone, monkeypatch, seconds, wanted):
    """Others would choose otherwise."""
    check(hk, world, everyone, monkeypatch, "plain", seconds, wanted)


@TIMES
@on_ranks("keras", "keras-jax", n=2)
def test_what_keras_compiles_follows_the_choice(hk, world, everyone, monkeypatch, seconds, wanted):
    check(hk, world, everyone, monkeypatch, "plain", seconds, wanted)


@TIMES
@pytest.mark.parametrize("how", ["compiled", "plain"])
@on_ranks("tensorflow", n=(2, 3))
def test_graphs_follow_the_choice(hk, world, everyone, monkeypatch, how, seconds, wanted):
    check(hk, world, everyone, monkeypatch, how, seconds, wanted)


@TIMES
@pytest.mark.parametrize("how", ["plain", "behind", pytest.param("compiled", marks=needs("jax", "optax"))])
@on_ranks("arrays", n=(2, 3), mpi=True)
def test_arrays_follow_the_choice(hk, world, everyone, monkeypatch, how, seconds, wanted):
    check(hk, world, everyone, monkeypatch, how, seconds, wanted)


@on_ranks("tensorflow", n=2)
def test_a_loop_of_a_graph_takes_turns(hk, world, monkeypatch):
    """One call of a function is the whole trial, and the steps after it."""
    import tensorflow as tf

    from hvdkit.core import compression

    monkeypatch.setattr(compression, "clock", Clock({"none": 1.0, "bf16": 0.5, "int8": 0.4}))
    of_ranks = np.random.default_rng(0).uniform(-1, 1, (world.size, SIZE)).astype(np.float32)
    variable, given = tf.Variable(tf.zeros(SIZE)), tf.constant(of_ranks[world.rank])

    @tf.function
    def train():
        means = tf.TensorArray(tf.float32, STEPS + 7)
        for step in tf.range(STEPS + 7):
            with hk.distribute(tf.GradientTape(), compression="auto", groups=2) as tape:
                target = tf.reduce_sum(variable * given)
            means = means.write(step, tape.gradient(target, [variable])[0])
        return means.stack()

    errors = np.abs(train().numpy() - of_ranks.mean(axis=0)).max(axis=1)
    for number, error in enumerate(errors):
        lowest, highest = OFF[turn(number) if number <= STEPS else "int8"]
        assert lowest <= error <= highest, (number, error)
