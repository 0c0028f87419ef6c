"""Ported programs train: on two ranks they end with the weights of one process on the union batch."""

import ast
import os
import runpy
import socket
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks

pytest.importorskip("libcst")

from hvdkit.prepare.port import run, text

DATA = Path(__file__).parents[1] / "data" / "port" / "before"


def program(name: str) -> Path:
    """The ported program, in the directory of the test."""
    found = run.port(text.read(str(DATA / name)))
    assert found.left == ()
    path = Path.cwd() / f"ported_{os.getpid()}_{name}"
    path.write_bytes(found.after)
    return path


def trained(path: Path, **settings: str) -> list[float]:
    """The weights that a program ends with."""
    os.environ.update(settings)
    try:
        model = runpy.run_path(str(path), run_name="__main__")["model"]
    finally:
        for one in settings:
            del os.environ[one]
    weights = (
        model.get_weights() if hasattr(model, "get_weights") else [one.detach().numpy() for one in model.parameters()]
    )
    return [float(number) for one in weights for number in one.reshape(-1)]


def one_process(path: Path, size: int, batch: int, lr: float) -> list[float]:
    return trained(path, BATCH=str(size * batch), LR=str(size * lr))


def compare(everyone: Any, ours: list[float], theirs: list[float]) -> None:
    assert everyone(ours) == [ours] * 2
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@on_ranks("torch", n=2)
def test_a_pytorch_loop(world, everyone):
    ours = trained(program("single_torch.py"), BATCH="16", LR="0.05")
    compare(everyone, ours, one_process(DATA / "single_torch.py", world.size, 16, 0.05))
    assert [path.name for path in Path.cwd().glob("*.pt")] == ["net.pt"]


@on_ranks("torch", n=2)
def test_a_horovod_program_for_pytorch(hk, world, everyone):
    before = trained(DATA / "horovod_torch.py")
    compare(everyone, trained(program("horovod_torch.py")), before)


@on_ranks("torch", n=2, fresh=True)
def test_a_ddp_program(world, everyone):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = everyone(free.getsockname()[1])[0]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    rank = {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.local_rank)}
    before = trained(DATA / "ddp.py", **where, **rank)
    compare(everyone, trained(program("ddp.py")), before)


@on_ranks("keras", n=2)
def test_keras_fit(world, everyone):
    # 81 samples train, and 80 of them fill the steps of 2 ranks
    plain = (
        (DATA / "single_keras.py")
        .read_text()
        .replace("model.fit(x_train, y_train", "model.fit(x_train[:80], y_train[:80]")
    )
    path = Path.cwd() / f"plain_{os.getpid()}.py"
    path.write_text(plain.replace("validation_split=0.1, ", "").replace("model.save", "# model.save"))
    ours = trained(program("single_keras.py"), BATCH="8", LR="0.05")
    compare(everyone, ours, one_process(alone(path), world.size, 8, 0.05))


def alone(path: Path) -> Path:
    """A program whose optimizer averages nothing, which hvdkit's fit would refuse on several ranks."""
    content = path.read_text().replace("model.fit(", "keras.Model.fit.__wrapped__(model, ")
    path.write_text(content)
    return path


@on_ranks("keras", n=2)
def test_a_horovod_program_for_keras_2(world, everyone):
    ours = trained(program("horovod_keras.py"))
    assert everyone(ours) == [ours] * 2
    everyone(None)
    assert sorted(path.name for path in Path.cwd().glob("check*")) == ["checkpoint-1.keras", "checkpoint-2.keras"]


OWN_STEP = """\
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
x = np.random.RandomState(0).rand(33, 4).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(x)
dataset = dataset.shuffle(64).batch(8)


class Own(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def compile(self, d_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.inner(data) ** 2)
        grads = tape.gradient(loss, self.inner.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.inner.trainable_weights))
        return {"d_loss": loss}


model = Own(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
model.compile(d_optimizer=keras.optimizers.Adam(learning_rate=0.01))
history = model.fit(dataset, epochs=2, verbose=0)
losses = history.history["d_loss"]
"""


@on_ranks("keras", n=2)
def test_a_train_step_that_counts_no_samples(everyone):
    found = run.port(text.Text("own.py", OWN_STEP.encode(), ast.parse(OWN_STEP)))
    assert found.left == ()
    path = Path.cwd() / f"own_{os.getpid()}.py"
    path.write_bytes(found.after)
    losses = everyone(runpy.run_path(str(path), run_name="__main__")["losses"])
    assert losses[0] == losses[1] and len(losses[0]) == 2


@on_ranks("tensorflow", n=2)
def test_a_tape(world, everyone):
    ours = trained(program("single_tape.py"), BATCH="8", LR="0.05")
    plain = Path.cwd() / f"plain_{os.getpid()}.py"
    # of 97 samples 96 go to two ranks, each its own half of every 16
    plain.write_text(
        (DATA / "single_tape.py").read_text().replace("(x, y))\n", "(x[:96], y[:96]))\n", 1).replace("model.save", "# ")
    )
    compare(everyone, ours, one_process(plain, world.size, 8, 0.05))


@on_ranks("tensorflow", n=2)
def test_a_horovod_program_with_a_tape(world, everyone):
    ours = trained(program("horovod_tape.py"))
    assert everyone(ours) == [ours] * 2
