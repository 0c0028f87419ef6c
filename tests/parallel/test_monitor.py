"""hvdkit's Monitor on real ranks of each framework: what is injected on one rank is reported, and the history is right.

What is injected is large: ranks share busy cores here, and no test decides by a few milliseconds.
"""

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks

from hvdkit.core import listeners
from hvdkit.observe.history import read

FEATURES, EVERY, WINDOWS = 4, 2, 5
SLOW_S = 0.25
"""Far above what sharing a core costs a step of these small models."""


def injected_on(world, what):
    """What rank 1 does in (its input, its computation) of each step."""
    own = what if world.rank == 1 else ""
    waits = {"input": lambda: time.sleep(SLOW_S)}.get(own, lambda: None)

    def work():
        end = time.thread_time() + SLOW_S
        while time.thread_time() < end:
            pass

    return waits, {"compute": work, "blocked": lambda: time.sleep(SLOW_S)}.get(own, lambda: None)


def batches(wait):
    for step in range(EVERY * WINDOWS):
        wait()
        yield np.full((2, FEATURES), step % 3, "float32"), np.ones((2, 1), "float32")


def train_torch(hk, monitor, what, world, bad_step=0):
    import torch

    wait, compute = injected_on(world, what)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 3), torch.nn.Linear(3, 1))
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 0.001), model)
    hk.broadcast_state(model, optimizer)
    for step, (x, y) in enumerate(monitor(batches(wait)) if monitor else hk.record_steps(batches(wait)), start=1):
        optimizer.zero_grad()
        compute()
        loss = torch.nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y))
        if step >= bad_step > 0 and world.rank == 1:
            loss = loss * math.nan
        loss.backward()
        optimizer.step()
        if monitor:
            monitor.log(loss=loss)


def train_tensorflow(hk, monitor, what, world, bad_step=0):
    import keras
    import tensorflow as tf

    wait, compute = injected_on(world, what)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.001)
    hk.broadcast_state(model, optimizer)

    @tf.function
    def train(x, y, factor):
        tf.py_function(compute, [], [])
        with hk.distribute(tf.GradientTape()) as tape:
            loss = factor * tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    for step, (x, y) in enumerate(monitor(batches(wait)) if monitor else hk.record_steps(batches(wait)), start=1):
        factor = math.nan if step >= bad_step > 0 and world.rank == 1 else 1.0
        loss = train(x, y, tf.constant(factor))
        if monitor:
            monitor.log(loss=loss)


def train_keras(hk, monitor, what, world, bad_step=0):
    import keras
    import tensorflow as tf

    wait, compute = injected_on(world, what)

    class Slow(keras.layers.Layer):
        def call(self, x):
            if keras.backend.backend() == "tensorflow" and what in ("compute", "blocked"):
                with tf.control_dependencies([tf.py_function(compute, [], [])]):
                    return tf.identity(x)
            if keras.backend.backend() == "torch":
                compute()
            return x

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return EVERY * WINDOWS

        def __getitem__(self, index):
            wait()
            factor = math.nan if index + 1 >= bad_step > 0 and world.rank == 1 else 1.0
            return np.full((2, FEATURES), 1 + index % 3, "float32"), np.full((2, 1), factor, "float32")

    layers = [keras.Input((FEATURES,)), Slow(), keras.layers.Dense(3), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(hk.distribute(keras.optimizers.SGD(0.001)), "mse")
    callbacks = [hk.BroadcastState(), *([monitor] if monitor else [])]
    model.fit(Batches(), epochs=1, verbose=0, shuffle=False, callbacks=callbacks)


def train(hk, monitor, what, world, bad_step=0):
    name = hk.__name__.rpartition(".")[2]
    globals()[f"train_{name}"](hk, monitor, what, world, bad_step)


def reports_of(directory):
    return [line for line in read(Path(directory, "metrics.jsonl")) if line["kind"] == "report"]


FRAMEWORKS = ("torch", "tensorflow", "keras", "keras-torch")


@on_ranks(*FRAMEWORKS)
@pytest.mark.parametrize("what", ["input", "compute", "blocked"])
def test_what_is_injected_on_a_rank_is_reported(hk, world, tmp_path, what):
    with hk.Monitor(tmp_path / "run", world, every=EVERY) as monitor:
        train(hk, monitor, what, world)
    if world.is_root:
        found = [one for one in reports_of(tmp_path / "run") if (one["about"], one["rank"]) == ("straggler", 1)]
        # a rank that computes where other programs have the cores waits for one most of the time; of TensorFlow's own
        # threads nobody says so
        right = ("compute", "cores", "late") if what == "compute" else (what,)
        assert len(found) == 1 and found[0]["cause"] in right, found
        assert found[0]["since"] == EVERY, "the first window counts as a beginning, and it began after that"
        assert found[0]["cost"] > SLOW_S / 2
        windows = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "window"]
        assert [one["step"] for one in windows] == list(range(EVERY, EVERY * WINDOWS + 1, EVERY))
        assert all(len(one["ranks"][name]) == 2 for one in windows for name in ("step", "input", "compute", "wait"))


@on_ranks(*FRAMEWORKS)
def test_a_gradient_that_is_not_finite_is_named_by_rank_and_step(hk, world, tmp_path):
    with hk.Monitor(tmp_path / "run", world, every=EVERY) as monitor:
        train(hk, monitor, "", world, bad_step=6)
    if world.is_root:
        found = [one for one in reports_of(tmp_path / "run") if "gradient" in one["text"]]
        assert [(one["rank"], one["cause"], one["since"]) for one in found] == [(1, "nonfinite", 6)]
        assert any(name in found[0]["text"] for name in ("weight", "kernel", "bias")), found[0]["text"]


@on_ranks("torch", "tensorflow", "keras", "keras-torch", "keras-jax", n=3)
def test_the_history_holds_the_means_of_all_ranks(hk, world, tmp_path):
    with hk.Monitor(tmp_path / "run", world, every=2) as monitor:
        for step, batch in enumerate(monitor([np.zeros((world.rank + 1, 2))] * 4)):
            monitor.log(loss=float(step + len(batch)))
    if world.is_root:
        windows = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "window"]
        mean = (1 * 1 + 2 * 2 + 3 * 3) / 6
        assert [one["logs"]["loss"] for one in windows] == pytest.approx([mean + 0.5, mean + 2.5])
        assert windows[0]["samples_per_s"] > 0


@on_ranks("torch", "tensorflow", "keras", fresh=True)
@pytest.mark.parametrize("marked", [True, False])
def test_a_monitor_without_touching_the_script(hk, world, tmp_path, marked):
    os.environ.update(HVDKIT_MONITOR=str(tmp_path / "run"), HVDKIT_MONITOR_EVERY=str(EVERY))
    hk.init()
    if not marked:
        hk.record_steps = lambda batches: batches
    train(hk, None, "compute", world)
    for one in list(listeners.MONITORS):
        one.close()
    if world.is_root:
        lines = read(tmp_path / "run" / "metrics.jsonl")
        ends = list(range(EVERY, EVERY * WINDOWS + 1, EVERY))
        assert [line["step"] for line in lines if line["kind"] == "window"] == ends
        found = [(one.get("about"), one.get("rank"), one.get("cause")) for one in lines if one["kind"] == "report"]
        if marked or not hk.__name__.endswith("tensorflow"):  # there nobody says what is waiting
            assert [one[:2] for one in found] == [("straggler", 1)] and found[0][2] in ("compute", "cores", "late")


@on_ranks("keras")
def test_a_fit_that_is_resumed_goes_on_in_its_history(hk, world, tmp_path):
    import keras

    data = hk.shard((np.zeros((16, FEATURES), "float32"), np.zeros((16, 1), "float32")), world, 2)
    for epochs in (1, 2):
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        model.compile(hk.distribute(keras.optimizers.SGD(0.001)), "mse")
        with hk.Monitor(tmp_path / "run", world, every=2) as monitor:  # before the callback that restores
            callbacks = [hk.BroadcastState(), monitor, hk.Checkpoint(tmp_path / "saved")]
            model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    if world.is_root:
        lines = read(tmp_path / "run" / "metrics.jsonl")
        assert [line["step"] for line in lines if line["kind"] == "window"] == [2, 4, 6, 8]
        assert [line["step"] for line in lines if line["kind"] == "start"] == [0, 4]


@on_ranks("keras", n=1)
def test_a_fit_that_failed_leaves_no_step_and_logs_of_all_kinds_end_no_fit(hk, world, tmp_path, monkeypatch):
    import keras

    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                raise ZeroDivisionError

    def fit(*callbacks):
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        model.compile(hk.distribute(keras.optimizers.SGD(0.001)), "mse")
        data = np.zeros((8, FEATURES), "float32"), np.zeros((8, 1), "float32")
        model.fit(*data, batch_size=2, verbose=0, callbacks=list(callbacks))

    from hvdkit.observe.monitor import begin_if_asked

    monkeypatch.setenv("HVDKIT_MONITOR", str(tmp_path / "run"))
    begin_if_asked(hk.Monitor, world)
    (monitor,) = listeners.MONITORS
    with pytest.raises(ZeroDivisionError):
        fit(Fails())
    fit()
    monitor.on_train_batch_end(4, {f"n{number}": 1.0 for number in range(20)} | {"matrix": np.zeros((2, 2))})
    monitor.close()
    _start, window, end = read(tmp_path / "run" / "metrics.jsonl")
    assert (window["step"], end["step"]) == (6, 6), "two before the error, and the four of the second fit"
    assert len(window["logs"]) == 16 and "matrix" not in window["logs"]


def say_and_fail(hk, world, tmp_path):
    with hk.Monitor(tmp_path / "run", world, every=2) as monitor:
        for step, _ in enumerate(monitor(range(100))):
            if step == 7 and world.rank == 1:
                raise ValueError("rank 1 has failed")
            hk.average_metrics({"a": 1.0}, world)


@pytest.mark.parallel
def test_a_rank_that_fails_ends_the_job_and_leaves_a_valid_history(run_job, tmp_path):
    said = run_job("torch", say_and_fail, fails=True, tmp_path=tmp_path)
    assert "rank 1 has failed" in said
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "window"] in ([2, 4], [2, 4, 6])
    assert lines[-1]["kind"] == "window"
