"""``hvdkit bench`` with real jobs: a training whose rank 1 computes longer than rank 0, and the adapters' recorders."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import missing, warm

from hvdkit.core import listeners
from hvdkit.observe import step_files

pytestmark = pytest.mark.parallel

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SEARCH_PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
LAUNCHER = next((name for name in ("mpirun", "horovodrun") if shutil.which(name, path=SEARCH_PATH)), None)
needs_launcher = pytest.mark.skipif(LAUNCHER is None, reason="neither mpirun nor horovodrun")
TIMEOUT_S = 120

TORCH = """
import time
import torch
import hvdkit.torch as hk

world = hk.init()
model = torch.nn.Linear(4, 1)
optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
hk.broadcast_state(model, optimizer)
for x in hk.record_steps([torch.ones(2, 4)] * 15):
    time.sleep(0.08 if world.rank == 1 else 0.01)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""
SLEEPER = """
import os, pathlib, time
pathlib.Path(f"{os.getpid()}.pid").touch()
time.sleep(600)
"""


@pytest.fixture
def environment():
    ours = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "OMP_NUM_THREADS")
    outer = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**outer, "PYTHONPATH": str(REPOSITORY)}


def argv(*words):
    return [sys.executable, "-m", "hvdkit.cli", "bench", "scaling", "--launcher", LAUNCHER, "-o", "r.json", *words]


@needs_launcher
@pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod")
def test_a_rank_that_computes_longer_is_shown_as_wait_of_the_other(tmp_path, environment):
    (tmp_path / "train.py").write_text(TORCH)
    train = warm("torch").stub("rank_script", "train.py")
    done = subprocess.run(
        argv("-n", "1,2", "--weak", "--repeats", "1", "--threads", "1", "--", *train),
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "r.json").read_text())
    alone, two = content["summary"]["rows"]
    assert alone["parts"]["wait"] == 0
    assert two["causes"][0]["ranks"] == [1]
    assert two["parts"]["wait"] > 0.02
    assert two["parts"]["communication"] is not None
    assert sum(two["parts"].values()) == pytest.approx(two["step_s"], rel=0.05)
    assert "Verdict: Rank 1 is blocked." in done.stdout, "it sleeps"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@needs_launcher
def test_ctrl_c_ends_the_ranks_and_keeps_the_file(tmp_path, environment):
    (tmp_path / "train.py").write_text(SLEEPER)
    process = subprocess.Popen(
        argv("-n", "2", "--", "train.py"),
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert time.monotonic() < deadline and process.poll() is None, "two ranks did not start"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "the same command line goes on" in err and "Traceback" not in err
    assert json.loads((tmp_path / "r.json").read_text())["jobs"] == []


def recorded(directory, rank):
    (own,) = [times for times in step_files.read(Path(directory)) if times.rank == rank]
    assert all(step.asked <= step.given <= step.ended for step in own.steps)
    return len(own.steps), [step.ready is not None and step.ready - step.given for step in own.steps]


def train_tensorflow(directory):
    os.environ[listeners.STEP_TIMES] = directory
    import tensorflow as tf

    import hvdkit.tensorflow as hk

    world = hk.init()
    variable = tf.Variable([1.0])

    @tf.function
    def gradient():
        with hk.distribute(tf.GradientTape()) as tape:
            loss = 2 * variable
        return tape.gradient(loss, [variable])[0]

    for take in (gradient, gradient.python_function):
        for _ in hk.record_steps([1, 2, 3]):
            time.sleep(0.3 * world.rank)
            take().numpy()
    return recorded(directory, world.rank)


def train_keras(directory):
    os.environ[listeners.STEP_TIMES] = directory
    import keras
    import numpy as np

    import hvdkit.keras as hk

    world = hk.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.01)), "mse")
    late = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_, **__: time.sleep(0.3 * world.rank))
    data = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")
    model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=[hk.BroadcastState(), hk.RecordSteps(), late])
    return recorded(directory, world.rank)


@pytest.mark.parametrize("framework", ["tensorflow", "keras"])
def test_the_adapters_record_every_step_and_when_the_gradients_were_there(run_job, tmp_path, framework):
    found = run_job(framework, globals()[f"train_{framework}"], directory=str(tmp_path))
    assert [count for count, _ in found] == [6, 6]
    assert all(worked >= 0.3 for worked in found[1][1]), "rank 1 worked longer"
    assert sorted(found[0][1])[2] < 0.3, "rank 0 was ready and waited, but for what was built first"
